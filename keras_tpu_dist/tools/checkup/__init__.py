"""Checks a machine: are its results correct, and is it as fast as it should be?"""
