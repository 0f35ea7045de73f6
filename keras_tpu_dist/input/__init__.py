"""Batches on their way to the mesh: read, placed, some ahead of the step, their place known."""
