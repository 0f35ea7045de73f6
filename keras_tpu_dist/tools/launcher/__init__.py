"""Starts processes, passes on their output, and says which one failed. Imports no JAX."""
