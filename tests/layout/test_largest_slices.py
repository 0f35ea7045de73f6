"""Plans, reports and pictures for slices of thousands of chips are as short as for eight."""

import keras
import pytest

import keras_tpu_dist as ktd


def decoder():
    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(4096, 64)(tokens)
    h = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(8, 8)(h, h)
    x = x + keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(x))
    return keras.Model(tokens, keras.layers.Dense(4096)(x))


@pytest.mark.parametrize(
    ("topology", "devices"), [("v5p:16x16x24", 6144), ("tpu7x:16x16x36", 18_432)]
)
def test_reports_do_not_grow_with_the_chips(topology, devices):
    def lengths(topology, axes):
        strategy = ktd.TPUStrategy(axes, "tensor_parallel", topology=topology)
        with keras.StatelessScope(initialize_variables=False):
            model = decoder()
        table = model.layers[1].embeddings
        texts = [
            str(strategy.explain(model)),
            str(strategy.lint(model)),
            str(strategy.show(table)),
            strategy.show(model)._repr_html_(),
        ]
        return strategy.mesh.size, [len(text) for text in texts]

    _, small = lengths("v5p:2x2x2", {"data": 2, "model": 4})
    size, large = lengths(topology, {"data": -1, "model": 4})
    assert size == devices
    assert all(b <= a + 600 for a, b in zip(small, large, strict=True)), (small, large)


def test_an_assignment_of_the_largest_slice():
    whole = ktd.DeviceAssignment.build("tpu7x:16x16x36", computation_shape=[2, 2, 1, 2])
    assert whole.num_replicas * whole.num_cores_per_replica == 18_432
    assert len(str(whole)) < 5000
