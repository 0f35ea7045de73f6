"""Starts processes, passes on what they print, and starts them again. Imports no JAX."""
