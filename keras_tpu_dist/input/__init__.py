"""Batches on their way to the mesh: reading, placing, prefetching, the position in the input."""
