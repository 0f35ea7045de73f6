"""Analyses traced programs: which programs an equation calls, and how dimensions correspond.

`jaxprs` is the one way to look into a program of JAX, and to write one. On it stand `calls` (the
programs that an equation runs, and how often), `dimensions` (which dimension of a result is which
of an operand), `graph` (a program as values and operations, with calls inlined), `products` (matrix
products and their cost), `cuts` (which kernels can be split together), `equal` (programs that are
the same) and `rows` (one program for batches of several numbers of rows). `device_groups` reads the
groups of collectives from XLA's text.

What may be computed otherwise than a model is written is a list, `passes.PASSES`, with an answer
for each program (`answers`): operations that XLA partitions wrong (`partitioner`), caches of
`generate` in place (`generation`), accumulated gradients summed once for each update (`sums`),
embedding tables by rows (`tables`), logits in pieces of the vocabulary (`head`), only the chosen
experts of a token (`experts`), LoRA by its factors (`low_rank`), and those that other packages
decide, with the rewriting here: equal blocks as a loop (`scan`), kernels split by heads (`fused`).
"""
