"""A model's fit, evaluate and predict under a strategy: its launches, guarded and counted."""
