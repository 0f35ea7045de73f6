"""Computes logits and their loss in pieces of the vocabulary."""
