"""Which activations of a step are kept for the gradients, and which are recomputed."""
