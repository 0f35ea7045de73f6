"""Checks a machine: are its results correct?"""
