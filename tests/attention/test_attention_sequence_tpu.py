"""Long sequences split along time, compiled by the real TPU compiler."""

import keras
import pytest

import keras_tpu_dist as ktd

kl = keras.layers
pytestmark = [pytest.mark.slow, pytest.mark.tpu_compiler]


def decoder(time):
    def build():
        tokens = keras.Input((time,), dtype="int32")
        x = kl.Embedding(1024, 512)(tokens)
        y = kl.LayerNormalization()(x)
        x = x + kl.GroupQueryAttention(128, 4, 2)(y, y, use_causal_mask=True)
        x = x + kl.Dense(512)(kl.Dense(2048, activation="gelu")(kl.LayerNormalization()(x)))
        model = keras.Model(tokens, kl.Dense(1024)(x))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


@pytest.fixture(autouse=True)
def bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def test_a_row_of_131_072_tokens_fits_sixteen_chips():
    strategy = ktd.TPUStrategy({"sequence": 16}, "fsdp", topology="v5e:4x4", remat="full")
    run = ktd.dry_run(decoder(131_072), strategy, batch_size=1)
    assert run.fits
    # Keys and values of 2 heads, forwards and again for the gradients, as they are: not of 4.
    gathered = [
        c for c in run.cost.collectives if c.kind == "all-gather" and "grouped_query" in c.layer
    ]
    of_keys = 131_072 * 2 * 128 * 2
    assert sum(c.times * c.bytes for c in gathered if c.bytes >= of_keys / 2) == 2 * 2 * of_keys
    assert any(c.kind == "collective-permute" for c in run.cost.collectives)
    assert run.memory["temporaries"] < 2**31


def test_activations_are_as_many_parts():
    def temporaries(mesh, rows):
        strategy = ktd.TPUStrategy(mesh, topology="v5e:2x2")
        return ktd.dry_run(decoder(8192), strategy, batch_size=rows).memory["temporaries"]

    # Beside its quarter, a device has keys and values of the whole row, and their gradients.
    whole = 4 * 8192 * 2 * 128 * 2
    assert temporaries({"sequence": 4}, 1) < temporaries({"data": 4}, 4) / 4 + whole
