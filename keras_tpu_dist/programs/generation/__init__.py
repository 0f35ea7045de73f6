"""Writes the caches of loops over tokens in place."""
