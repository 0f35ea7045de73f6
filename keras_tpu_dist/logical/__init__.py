"""Logical devices: layers assigned to one, tensors split over them."""
