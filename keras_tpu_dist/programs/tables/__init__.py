"""Embedding tables split by rows: exchanges ids and rows, and updates only the used rows."""
