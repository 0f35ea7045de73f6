"""Values between the blocks of a model: each device has a part of their times."""
