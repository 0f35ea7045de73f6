"""Mixtures of experts that compute only the chosen experts of each token."""
