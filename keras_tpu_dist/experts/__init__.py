"""Mixtures of experts that compute only the experts that a token has chosen."""
