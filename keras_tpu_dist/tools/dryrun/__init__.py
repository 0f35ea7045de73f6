"""Compiles a model for a slice that you don't have, and reports on the program."""
