"""The share of a run's time that trained, over all its restarts, and how the rest was spent."""
