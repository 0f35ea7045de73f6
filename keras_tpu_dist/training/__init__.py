"""fit, evaluate and predict under a strategy: launches, the guard of the state, threads.

A model belongs to a strategy from its creation or its first run: `scope.Scope` makes a strategy the
active one, `membership` knows which strategy a model belongs to, and `adoption.adopt` moves its
variables onto the mesh. Keras's trainer then asks `runner.Runner` for everything: it enters the
scope around a call, and gives the function that Keras's loop calls, a `loop.Training`,
`loop.Evaluation` or `loop.Prediction`. Such a loop launches `step.jitted_step`, Keras's own step as
one program, for one batch or for several (`auto_steps` chooses how many).

`guard.StateGuard` keeps what an exception would lose, `finite` stops at the first value that is not
finite, `rows` pads batches of several sizes so that they share a program. `fit_control.FitControl`
has what callbacks ask of a running fit, `running` has the call that runs in a thread, and `turns`
lets threads take turns on one model. `generation` is the function for `generate`. Packages below
`strategy` see a strategy by `protocol.Strategy`.
"""
