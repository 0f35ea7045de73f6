"""Batches on their way to the mesh: reading, placing, reading ahead, the position in the input."""
