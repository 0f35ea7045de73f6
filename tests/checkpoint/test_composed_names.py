"""Names that Keras makes of other names: a model that is made again in one process is the same.

Every public layer class of Keras has a row, or is named among those without variables.
"""

import inspect

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.names import METRICS, WEIGHTS, automatic_names, match, named_state

L = keras.layers
VECTOR, TIMES, IMAGE, VOLUME = (6,), (8, 6), (8, 8, 4), (4, 6, 6, 2)


def cells():
    return L.RNN(L.StackedRNNCells([L.LSTMCell(4), L.GRUCell(3)]))


ROWS = {
    "AdditiveAttention": (lambda: Of(L.AdditiveAttention()), TIMES),
    "Attention": (lambda: Of(L.Attention(use_scale=True)), TIMES),
    "BatchNormalization": (L.BatchNormalization, VECTOR),
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(3)), TIMES),
    "Conv1D": (lambda: L.Conv1D(4, 3), TIMES),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(4, 3), TIMES),
    "Conv2D": (lambda: L.Conv2D(4, 3), IMAGE),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(4, 3), IMAGE),
    "Conv3D": (lambda: L.Conv3D(4, 3), VOLUME),
    "Conv3DTranspose": (lambda: L.Conv3DTranspose(4, 3), VOLUME),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(2, 2), IMAGE),
    "ConvLSTM2D": (lambda: L.ConvLSTM2D(2, 2), VOLUME),
    "ConvLSTM3D": (lambda: L.ConvLSTM3D(2, 2), (2, 4, 4, 4, 2)),
    "Dense": (lambda: L.Dense(4, lora_rank=2), VECTOR),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(3), TIMES),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(3), IMAGE),
    "Dropout": (lambda: L.Dropout(0.2), VECTOR),
    "EinsumDense": (lambda: L.EinsumDense("abc,cd->abd", (8, 4), bias_axes="d"), TIMES),
    "Embedding": (lambda: L.Embedding(12, 4), VECTOR),
    "GRU": (lambda: L.GRU(3), TIMES),
    "GRUCell": (lambda: L.RNN(L.GRUCell(3)), TIMES),
    "GroupNormalization": (lambda: L.GroupNormalization(2), VECTOR),
    "GroupQueryAttention": (lambda: Of(L.GroupQueryAttention(3, 4, 2)), TIMES),
    "LSTM": (lambda: L.LSTM(3), TIMES),
    "LSTMCell": (lambda: L.RNN(L.LSTMCell(3)), TIMES),
    "LayerNormalization": (L.LayerNormalization, VECTOR),
    "MultiHeadAttention": (lambda: Of(L.MultiHeadAttention(2, 3)), TIMES),
    "Normalization": (L.Normalization, VECTOR),
    "PReLU": (L.PReLU, VECTOR),
    "Pipeline": (lambda: L.Pipeline([L.RandomFlip(), L.RandomRotation(0.1)]), IMAGE),
    "RMSNormalization": (L.RMSNormalization, VECTOR),
    "RNN": (lambda: L.RNN([L.SimpleRNNCell(3), L.SimpleRNNCell(4)]), TIMES),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(12, 4), VECTOR),
    "STFTSpectrogram": (
        lambda: L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16, expand_dims=True),
        (64, 1),
    ),
    "SeparableConv1D": (lambda: L.SeparableConv1D(4, 3), TIMES),
    "SeparableConv2D": (lambda: L.SeparableConv2D(4, 3), IMAGE),
    "SimpleRNN": (lambda: L.SimpleRNN(3), TIMES),
    "SimpleRNNCell": (lambda: L.RNN(L.SimpleRNNCell(3)), TIMES),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(4)), VECTOR),
    "StackedRNNCells": (cells, TIMES),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(4)), TIMES),
    # Nested, named and not.
    "Bidirectional in TimeDistributed": (
        lambda: L.TimeDistributed(L.Bidirectional(L.GRU(3))),
        (3, 8, 6),
    ),
    "Bidirectional with a backward layer": (
        lambda: L.Bidirectional(L.LSTM(3), backward_layer=L.LSTM(3, go_backwards=True)),
        TIMES,
    ),
    "Bidirectional with a backward layer and names": (
        lambda: L.Bidirectional(
            L.LSTM(3, name="there"), backward_layer=L.LSTM(3, go_backwards=True, name="back")
        ),
        TIMES,
    ),
    "Bidirectional of cells": (
        lambda: L.Bidirectional(L.RNN([L.GRUCell(3), L.GRUCell(4)], return_sequences=True)),
        TIMES,
    ),
    "Bidirectional in a model": (
        lambda: keras.Sequential([keras.Input(TIMES), L.Bidirectional(L.LSTM(2)), L.Dense(3)]),
        TIMES,
    ),
    "a layer that names others after itself": (lambda: Block(), VECTOR),
    "a quantized layer": (lambda: L.Dense(4, dtype="int8_from_float32"), VECTOR),
}
if hasattr(L, "TernaryDense"):  # from Keras 3.16 on
    ROWS["TernaryDense"] = (lambda: L.TernaryDense(4), VECTOR)
_POOLING = [
    f"{kind}{pool}{d}D"
    for kind in ("Average", "Max", "GlobalAverage", "GlobalMax", "AdaptiveAverage", "AdaptiveMax")
    for pool in ("Pooling", "Pool")
    for d in (1, 2, 3)
]
_PLAIN = """
    Activation ActivityRegularization Add AlphaDropout AugMix AutoContrast Average
    CategoryEncoding CenterCrop Concatenate ContrastLimitedAdaptiveHistogramEqualization CutMix
    Discretization Dot ELU Equalization Flatten FlaxLayer GaussianDropout GaussianNoise
    HashedCrossing Hashing Identity InputLayer IntegerLookup JaxLayer Lambda Layer LeakyReLU
    Masking MaxNumBoundingBoxes Maximum MelSpectrogram Minimum MixUp Mosaic Multiply Permute ReLU
    RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast
    RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale
    RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation
    RandomSharpness RandomShear RandomTranslation RandomZoom RepeatVector Rescaling Reshape
    Resizing Softmax Solarization StringLookup Subtract TFSMLayer TextVectorization
    TorchModuleWrapper UnitNormalization Wrapper
"""
# They have a random state at the most, as the rows of Dropout and Pipeline do.
NO_WEIGHTS = {
    *_POOLING,
    *(f"{kind}{d}D" for kind in ("Cropping", "UpSampling", "ZeroPadding") for d in (1, 2, 3)),
    *(f"SpatialDropout{d}D" for d in (1, 2, 3)),
    *_PLAIN.split(),
}


class Of(L.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, attention):
        super().__init__(name="of")
        self.attention = attention

    def call(self, x):
        lists = isinstance(self.attention, (L.Attention, L.AdditiveAttention))
        return self.attention([x, x]) if lists else self.attention(x, x)


class Block(L.Layer):
    """Its name in those of its layers, as many people write it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.one = L.Dense(6, name=f"{self.name}_ffn")
        self.other = L.Dense(6, name=f"{self.name}_ffn_2")

    def call(self, x):
        return self.other(self.one(x))


def twice(make, shape):
    """The same model, made again after others."""
    models = []
    for others in (0, 11):  # so that 10 comes before 9 in the order of letters
        for _ in range(others):
            L.Dense(1), L.LSTM(1), L.GRU(1), L.SimpleRNN(1), Block(), L.Bidirectional(L.LSTM(1))
        models.append(keras.Sequential([keras.Input(shape), make()]))
    return models


def test_every_layer_class_of_keras_has_a_row():
    kinds = {
        name: kind
        for name, kind in vars(L).items()
        if inspect.isclass(kind) and issubclass(kind, L.Layer)
    }
    known = {kinds[name] for name in ROWS.keys() & kinds} | {
        kinds[name] for name in NO_WEIGHTS & kinds.keys()
    }
    lacking = sorted(name for name, kind in kinds.items() if kind not in known)
    assert not lacking, "a new layer class: give it a row, or name it among NO_WEIGHTS"


@pytest.mark.parametrize("name", ROWS)
def test_a_model_made_again_has_the_same_names_but_for_keras_s_numbers(name):
    make, shape = ROWS[name]
    first, again = twice(make, shape)
    assert [v.path for v in first.variables] != [v.path for v in again.variables]
    entries = [[entry for entry, _ in named_state(model)[WEIGHTS]] for model in (again, first)]
    names = [automatic_names([model]) for model in (again, first)]
    found = match(*entries, automatic=names[0], automatic_there=names[1])
    assert found.complete, found.misfits
    assert found.pairs == {i: i for i in range(len(entries[0]))}


def test_names_of_the_user_stay_names():
    def made(one, other):
        return keras.Sequential(
            [
                keras.Input(TIMES),
                L.Bidirectional(L.LSTM(3, return_sequences=True, name=one)),
                L.Bidirectional(L.LSTM(3, name=other)),
            ]
        )

    first, again = made("task_1", "task_2"), made("task_2", "task_3")
    entries = [[entry for entry, _ in named_state(model)[WEIGHTS]] for model in (again, first)]
    names = [automatic_names([model]) for model in (again, first)]
    assert not any("task" in name for own in names for name in own)
    found = match(*entries, automatic=names[0], automatic_there=names[1])
    assert len(found.missing) == len(found.unexpected) == 6
    assert {"task_1", "task_3"} == {
        path.split("/")[2].partition("_")[2] for path in (*found.missing, *found.unexpected)
    }


def test_more_than_nine_layers_keep_their_order():
    def made():
        return keras.Sequential(
            [keras.Input(TIMES)]
            + [L.Bidirectional(L.GRU(3, return_sequences=True)) for _ in range(12)]
        )

    first, again = made(), made()
    entries = [[entry for entry, _ in named_state(model)[WEIGHTS]] for model in (again, first)]
    names = [automatic_names([model]) for model in (again, first)]
    found = match(*entries, automatic=names[0], automatic_there=names[1])
    assert found.pairs == {i: i for i in range(len(entries[0]))}


def test_losses_of_outputs_without_names():
    """Keras names them after the outputs: a run within an epoch lost what they had summed up."""
    x, y = np.ones((8, 6), "float32"), np.ones((8, 1), "float32")
    models = []
    for _ in range(2):
        inputs = keras.Input(VECTOR)
        model = keras.Model(inputs, [L.Dense(1)(inputs), L.Dense(1)(inputs)])
        model.compile("sgd", "mse", metrics=["mae", "mae"])
        model.train_on_batch(x, [y, y])
        models.append(model)
    first, again = models
    assert first.metrics_variables[-1].path != again.metrics_variables[-1].path
    entries = [[entry for entry, _ in named_state(model)[METRICS]] for model in (again, first)]
    names = [automatic_names([model]) for model in (again, first)]
    found = match(*entries, automatic=names[0], automatic_there=names[1])
    assert found.complete, found.misfits
    assert found.pairs == {i: i for i in range(len(entries[0]))}


def test_a_bidirectional_layer_is_resumed_in_the_same_process(tmp_path):
    x = np.random.default_rng(0).normal(size=(16, 4, 3)).astype("float32")
    y = x[:, 0]

    def trained(epochs, *callbacks):
        keras.utils.set_random_seed(1)
        with ktd.TPUStrategy().scope():
            model = keras.Sequential([keras.Input((4, 3)), L.Bidirectional(L.LSTM(2)), L.Dense(3)])
            model.compile("adam", "mse")
        model.fit(x, y, 8, epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
        return model

    whole = trained(3)
    trained(2, ktd.callbacks.Checkpoint(tmp_path))
    resumed = trained(3, ktd.callbacks.Checkpoint(tmp_path))
    assert int(resumed.optimizer.iterations) == 6
    for own, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
