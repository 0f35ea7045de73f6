"""A model compiled for a slice that nobody here owns, and what the program says."""
