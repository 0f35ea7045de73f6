"""Chips, slices and their topology, meshes over them, devices simulated on a CPU."""
