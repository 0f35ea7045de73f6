"""Batches on their way to the mesh: reading, placing, prefetching, the position in the input.

`iterator.DeviceIterator` has the batches of an epoch: it reads host batches, hands out launches of
one batch or of several, and reads ahead while the devices work. `batches.BatchPlacer` pads a batch
to equal shards and transfers it (`training.rows` may ask for more rows, those of another batch);
`batch_axis` finds the dimension of the rows of every array, and `host_arrays` checks and pads it.
`position.Progress` knows where training is in the input, which a checkpoint saves, and `clock`
measures how long the devices wait.

With several processes, `same_input` checks that all read the same. With `input="per_process"` each
reads its own rows: `shards` says which, `own_input.OwnInput` lets all take the same steps, and
`process_rows` places them.
"""
