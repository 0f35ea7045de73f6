"""Runs of equal blocks as one loop each; see `memory.scan_blocks`."""
