"""Starts processes, passes on their output, and restarts them. Imports no JAX."""
