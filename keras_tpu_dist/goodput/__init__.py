"""What share of a run's time trained, over all of its restarts, and what the rest went to."""
