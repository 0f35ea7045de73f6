"""Inputs shared by tests and by the scripts that tests run as processes."""

import keras


class Batches(keras.utils.PyDataset):
    """Rows of arrays, or of structures of them: for each batch a slice or indices."""

    def __init__(self, arrays, rows):
        super().__init__()
        self.arrays, self.rows = arrays, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        rows = self.rows[index]
        return keras.tree.map_structure(lambda array: array[rows], tuple(self.arrays))

    def endless(self):
        """A generator of the batches, again and again."""
        while True:
            yield from (self[i] for i in range(len(self)))


def in_batches(size, *arrays):
    """Arrays in batches of `size` rows, the last of what is left."""
    starts = range(0, len(keras.tree.flatten(arrays)[0]), size)
    return Batches(arrays, [slice(start, start + size) for start in starts])
