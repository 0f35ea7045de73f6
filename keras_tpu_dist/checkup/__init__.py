"""The first minute on a machine: does it compute right, and as fast as it should?"""
