"""What keras.callbacks.OrbaxCheckpoint wrote is loaded right on any mesh, or is one error."""

import keras
import numpy as np
import pytest
from checkpoint_models import X, Y, made, mlp, nested, numbers, subclassed
from helpers import assert_close

import keras_tpu_dist as ktd

slow = pytest.mark.slow


def written(place, directory, build=mlp, optimizer="adam", **options):
    """A model that trained two epochs, and the directory that Keras wrote."""
    model = made(place, build, optimizer=optimizer)
    saved = keras.callbacks.OrbaxCheckpoint(
        directory, max_to_keep=None, save_on_background=False, **options
    )
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[saved])
    return model


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("tensor", "fsdp", marks=slow),
        pytest.param("stock", "tensor", marks=slow),
        pytest.param("fsdp", "stock", marks=slow),
    ],
)
def test_one_mesh_wrote_another_reads(source, target, tmp_path):
    one = written(source, tmp_path)
    other = made(target)
    before = {v.path: v.value.sharding for v in other.weights}
    report = ktd.restore(other, tmp_path)
    assert (report.step, report.optimizer, report.kept, report.unused) == (1, True, (), ())
    assert_close(numbers(other), numbers(one))
    assert {v.path: v.value.sharding for v in other.weights} == before
    # An earlier step, and the directory of one step.
    assert ktd.restore(other, tmp_path, step=0).step == 0
    assert not np.allclose(other.get_weights()[0], one.get_weights()[0])
    assert ktd.restore(other, tmp_path / "1").step == 1
    assert_close(numbers(other), numbers(one))


@slow
@pytest.mark.parametrize(
    ("build", "optimizer"), [(mlp, "adam"), (subclassed, "lion"), (nested, "sgd")]
)
def test_models_made_twice_in_one_process_load_right(build, optimizer, tmp_path):
    # keras#23251: with other automatic names Keras's own loading loads nothing, and says nothing.
    one = written("data", tmp_path, build, optimizer)
    again = made("tensor", build, optimizer=optimizer)
    assert again.weights[0].path != one.weights[0].path
    report = ktd.restore(again, tmp_path)
    assert report.optimizer
    assert report.renamed
    assert len(report.loaded) == len(again.variables)
    assert_close(numbers(again), numbers(one))


@slow
def test_many_layers_without_names_keep_their_order(tmp_path):
    def deep():
        return keras.Sequential(
            [keras.Input((16,)), *(keras.layers.Dense(16) for _ in range(12)), mlp()]
        )

    one = written("stock", tmp_path, deep, save_weights_only=True)
    again = made("stock", deep)
    report = ktd.restore(again, tmp_path)
    assert not report.optimizer
    assert_close(again.get_weights(), one.get_weights())


@slow
def test_frozen_then_and_trained_now(tmp_path):
    # Keras files weights by whether they trained; its own loading leaves out those that changed.
    def frozen():
        model = mlp()
        ktd.freeze(model, "*", exclude="*head*")
        return model

    one = written("data", tmp_path, frozen)
    other = made("fsdp")
    report = ktd.restore(other, tmp_path)
    assert not report.optimizer
    assert_close(other.get_weights(), one.get_weights())


@slow
def test_a_damaged_one_is_an_error_and_the_one_before_is_loaded(tmp_path):
    written("stock", tmp_path)
    (tmp_path / "1" / "pytree" / "_METADATA").write_text("{")
    other = made("stock")
    with pytest.raises(ktd.CheckpointError, match=r"Checkpoint 1 of .* cannot be read"):
        ktd.restore(other, tmp_path, step=1)
    assert ktd.restore(other, tmp_path).step == 0
