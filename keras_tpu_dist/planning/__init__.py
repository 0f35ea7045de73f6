"""Which strategy is the fastest for a model on a slice."""
