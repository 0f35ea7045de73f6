"""Embedding tables by their rows: ids and rows exchanged, rows that were used updated alone."""
