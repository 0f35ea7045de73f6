"""A model with random and with moving state."""

import keras


def network(dropout=0.2):
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(4),
        ]
    )
