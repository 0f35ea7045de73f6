"""A batch's way through fit: placed, stepped, guarded, counted."""
