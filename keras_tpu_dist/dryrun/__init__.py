"""A model compiled for a slice that you don't have, and what the program says."""
