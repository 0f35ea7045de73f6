"""fit, evaluate and predict under a strategy: launches, the guard of the state, threads."""
