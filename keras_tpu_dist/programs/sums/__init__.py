"""Accumulated gradients: added up on each device, and over the devices once for each update."""
