"""The command `ktd`: slices, plans, dry runs, layouts and checkpoints from the shell."""
