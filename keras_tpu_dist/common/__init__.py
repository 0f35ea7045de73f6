"""Helpers for all packages: error messages, notices logged once, layouts as mesh axes."""
