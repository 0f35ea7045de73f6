"""Mixtures of experts that only compute the chosen experts of a token."""
