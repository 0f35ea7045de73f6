"""LoRA, quantized models, more or fewer layers: loaded right, and what is left is said."""

import keras
import numpy as np
import pytest
from checkpoint_models import X, made, mlp, numbers
from helpers import assert_close

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.snapshot import snapshot
from keras_tpu_dist.checkpoint.store import Store

slow = pytest.mark.slow
quantizes = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")


def saved(model, directory):
    """A checkpoint of a model as it is."""
    training = {"epoch": 0, "done": 0, "step": 1, "run": "run7"}
    store = Store(directory)
    store.save(1, *snapshot(model, training, {}))
    store.close()
    return model


def with_lora():
    model = mlp()
    model.layers[0].enable_lora(2)
    lora_b = model.layers[0].lora_kernel_b
    lora_b.assign(np.full(lora_b.shape, 0.5))
    return model


def as_int8():
    model = mlp()
    model.quantize("int8")
    return model


def made_quantized(place):
    return made(place, as_int8, compiled=False)


@slow
@pytest.mark.parametrize(("source", "target"), [("tensor", "fsdp"), ("stock", "data")])
def test_lora_is_loaded_on_another_mesh(source, target, tmp_path):
    one = saved(made(source, with_lora), tmp_path)
    other = made(target, lambda: keras.models.clone_model(mlp()))
    other.layers[0].enable_lora(2)
    report = ktd.restore(other, tmp_path)
    assert len([path for path in report.loaded if "lora" in path]) == 2
    assert_close(other.predict(X, verbose=0), one.predict(X, verbose=0))
    # The kernel still does not train.
    assert not [path for path in (v.path for v in other.trainable_weights) if "0/kernel" in path]


def test_a_base_checkpoint_into_a_model_with_lora(tmp_path):
    one = saved(made("stock", compiled=False), tmp_path)
    other = made("data", with_lora, compiled=False)
    with pytest.raises(ValueError, match=r"missing '\S*lora_kernel_a'"):
        ktd.restore(other, tmp_path)
    report = ktd.restore(other, tmp_path, exclude="*lora*")
    assert [path.rpartition("/")[2] for path in report.kept] == ["lora_kernel_a", "lora_kernel_b"]
    np.testing.assert_array_equal(np.asarray(other.weights[0]), np.asarray(one.weights[0]))


@quantizes
@slow
def test_a_quantized_model_is_loaded_on_another_mesh(tmp_path):
    one = saved(made_quantized("tensor"), tmp_path)
    other = made_quantized("fsdp")
    report = ktd.restore(other, tmp_path)
    assert len(report.loaded) == len(other.variables)
    for a, b in zip(other.weights, one.weights, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value))
    assert "int8" in {weight.dtype for weight in other.weights}
    assert_close(other.predict(X, verbose=0), one.predict(X, verbose=0))


@quantizes
def test_what_is_no_integer_is_not_loaded_into_a_quantized_model(tmp_path):
    one = saved(made("stock", compiled=False), tmp_path)
    one.save_weights(tmp_path / "a.weights.h5")
    other = made_quantized("stock")
    kernels = [np.asarray(v.value) for v in other.variables if v.dtype == "int8"]
    with pytest.raises(ValueError, match=r"kernel \(16, 32\) int8, saved as \(16, 32\) float32"):
        ktd.restore(other, tmp_path)
    for source in (tmp_path, tmp_path / "a.weights.h5"):
        report = ktd.restore(other, source, strict=False)
        assert len([path for path in report.kept if "kernel" in path]) == 4
        assert len([path for path in report.loaded if "bias" in path]) == 2
        left = [np.asarray(v.value) for v in other.variables if v.dtype == "int8"]
        assert len(left) == 2
        for value, before in zip(left, kernels, strict=True):
            np.testing.assert_array_equal(value, before)


def layers(count):
    return lambda: keras.Sequential(
        [
            keras.Input((16,)),
            *(keras.layers.Dense(16, name=f"block_{i}x") for i in range(count)),
            keras.layers.Dense(8, name="head"),
        ],
        name="stack",
    )


@slow
@pytest.mark.parametrize("place", ["stock", "tensor"])
def test_more_and_fewer_layers(place, tmp_path):
    three = saved(made(place, layers(3)), tmp_path)
    four = made("fsdp", layers(4))
    last = four.layers[3].get_weights()
    with pytest.raises(ValueError, match=r"missing 'stack/block_3x/kernel'"):
        ktd.restore(four, tmp_path)
    report = ktd.restore(four, tmp_path, strict=False)
    assert report.kept == ("stack/block_3x/kernel", "stack/block_3x/bias")
    assert (len(report.loaded), report.unused, report.optimizer) == (8, (), False)
    assert_close(four.layers[3].get_weights(), last)
    assert_close(
        [four.layers[i].get_weights() for i in (0, 1, 2, 4)],
        [layer.get_weights() for layer in three.layers],
    )
    two = made("data", layers(2))
    report = ktd.restore(two, tmp_path, strict=False)
    assert report.unused == ("stack/block_2x/kernel", "stack/block_2x/bias")
    assert (len(report.loaded), report.kept) == (6, ())
    assert "unused stack/block_2x/kernel" in str(report)
    assert_close(numbers(two)[:4], numbers(three)[:4])
