"""The fastest strategy, mesh or batch for a model on a slice, as the TPU compiler sees it."""
