"""What of a step's activations is kept for the gradients, and what is computed again."""
