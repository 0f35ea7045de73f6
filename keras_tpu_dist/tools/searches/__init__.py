"""Finds the fastest strategy, mesh or batch for a model on a slice, with the TPU compiler."""
