"""Compares recurrent layers and attention with references, forward and backward."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_tpu_dist import layers
from keras_tpu_dist.attention.dispatch import dot_product_attention
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.tools.checkup.aside import aside, in_float32
from keras_tpu_dist.tools.checkup.bench import Bench, Job
from keras_tpu_dist.tools.checkup.bounds import gap, is_exact, largest, tolerance
from keras_tpu_dist.tools.checkup.report import LEAVE_OUT, RIGHT, CheckPart, Problem, numbered

_LAYERS = ("LSTM", "GRU", "SimpleRNN")
# If products are rounded, a kernel may be off this many times as much as the reference itself.
_TIMES = 4.0


def recurrent(bench: Bench) -> CheckPart:
    """Compares this package's recurrent layers with Keras's, on one device.

    Args:
        bench: The check's shared state.
    """
    problems: list[Problem] = []
    gaps: dict[str, float] = {}
    for name in _LAYERS:
        with aside(), in_float32():
            found = _recurrent(bench, name)
        problems += _judged(bench, f"{name} layer", found, gaps)
    words = _words("LSTM, GRU, SimpleRNN, forward and gradient", "Keras's", gaps, problems)
    return CheckPart("recurrent", RIGHT, words, tuple(problems), gaps)


def attention(bench: Bench) -> CheckPart:
    """Compares this package's attention with the formula, on one device.

    Args:
        bench: The check's shared state.
    """
    problems: list[Problem] = []
    gaps: dict[str, float] = {}
    for words, causal in (("attention", False), ("causal attention", True)):
        problems += _judged(bench, words, _attention(bench, words, causal), gaps)
    words = _words("with a mask, and causal, forward and gradient", "the formula", gaps, problems)
    return CheckPart("attention", RIGHT, words, tuple(problems), gaps)


# The name of a result, the result, the expected one, and the expected one's own rounding error.
Results = Iterator[tuple[str, jax.Array, np.ndarray, float]]


def _recurrent(bench: Bench, name: str) -> Results:
    """Results of our layer and of Keras's layer with the same weights."""
    units, rows = (128, 8) if bench.platform == "tpu" else (16, 2)
    shape = (rows * bench.strategy.num_replicas_in_sync, 7, 12)
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    stock = getattr(keras.layers, name)(units, return_sequences=True, dtype="float32")
    stock.build(shape)
    weights = [0.3 * rng.normal(size=v.shape).astype(np.float32) for v in stock.weights]
    with bench.strategy.scope():
        ours = getattr(layers, name)(units, return_sequences=True, dtype="float32")
        ours.build(shape)
        run, rest = _layer_with_gradient(ours)
        found = _on_mesh(bench, name, run, (weights, rest, x), split=(False, False, True))
    run, rest = _layer_with_gradient(stock)
    return zip(_results(ours), found, *_alone(bench, run, weights, rest, x), strict=True)


def _results(layer: Any) -> list[str]:
    return [
        "the output",
        *(f"the gradient of {v.name}" for v in layer.weights),
        "the gradient of the input",
    ]


def _layer_with_gradient(layer: Any) -> tuple[Callable, list]:
    """A function of weights, other variables and input that returns the output and gradients."""
    rest = [np.asarray(v) for v in layer.non_trainable_variables]

    def run(weights, rest, x):
        def loss(weights, x):
            y, _ = layer.stateless_call(weights, rest, x)
            return _weighted(y), y

        (_, y), (of_weights, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
        return (y, *of_weights, of_x)

    return run, rest


def _weighted(y: jax.Array) -> jax.Array:
    """A sum with a different factor for every value."""
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))


def _attention(bench: Bench, words: str, causal: bool) -> Results:
    replicas = bench.strategy.num_replicas_in_sync
    time, width = (512, 64) if bench.platform == "tpu" else (24, 8)
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(replicas, time, 2, width)).astype(np.float32) for _ in range(3)]
    mask = rng.uniform(size=(replicas, 1, 1, time)) < 0.8
    mask[..., 0] = True

    def ours(query, key, value, mask):
        return dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            mesh=bench.mesh,
            data_axes=bench.strategy.data_axes,
            is_causal=causal,
        )

    def formula(query, key, value, mask):
        logits = jnp.einsum("bthd,bshd->bhts", query, key) / np.sqrt(width)
        seen = mask & jnp.tril(jnp.ones((time, time), bool)) if causal else mask
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, value)

    args = (arrays, mask)
    with aside(), in_float32():
        found = _on_mesh(bench, words, _attention_with_gradient(ours), args, split=(True, True))
    names = ["the output", *(f"the gradient of the {n}" for n in ("query", "key", "value"))]
    return zip(names, found, *_alone(bench, _attention_with_gradient(formula), *args), strict=True)


def _attention_with_gradient(attend: Callable) -> Callable:
    def loss(arrays, mask):
        y = attend(*arrays, mask)
        return _weighted(y), y

    def run(arrays, mask):
        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(arrays, mask)
        return (y, *grads)

    return run


def _on_mesh(
    bench: Bench, words: str, run: Callable, args: tuple, split: tuple[bool, ...]
) -> tuple:
    """The results of a function on the mesh; `split` says which arguments are split by rows."""
    rows, whole = bench.strategy.placer.sharding(0), named_sharding(bench.mesh)
    layouts = tuple(
        jax.tree.map(lambda _, of=rows if by_rows else whole: of, arg)
        for arg, by_rows in zip(args, split, strict=True)
    )
    leaves, structure = jax.tree.flatten(args)
    placed = jax.tree.unflatten(structure, put(leaves, jax.tree.leaves(layouts)))
    program = Jitted(run, bench.mesh, lambda *_: layouts, out_shardings=whole)
    return bench.launches.run(Job(words), program, *placed)


def _alone(bench: Bench, run: Callable, *args: Any) -> tuple[list[np.ndarray], list[float]]:
    """The results on one device in full precision, and the error in the configured precision."""

    def results(precision: str | None) -> list[np.ndarray]:
        with jax.default_device(bench.local[0]), jax.default_matmul_precision(precision):
            return [np.asarray(each) for each in jax.jit(run)(*args)]

    exact = results("highest")
    if bench.platform == "cpu" or is_exact():
        return exact, [0.0] * len(exact)
    usual = results(jax.config.jax_default_matmul_precision)
    return exact, list(map(gap, usual, exact))


def _judged(
    bench: Bench, words: str, results: Results, gaps: dict[str, float]
) -> Iterator[Problem]:
    for name, found, expected, own in results:
        scale = largest(expected)
        mine = {
            part.device.id: gap(part.data, expected[part.index], scale)
            for part in found.addressable_shards
        }
        every = bench.by_device(f"{words}, {name}", mine)
        gaps[words] = max(gaps.get(words, 0.0), *every.values())
        allowed = max(tolerance(bench.platform), _TIMES * own)
        wrong = {n: off for n, off in every.items() if off > allowed}
        if wrong:
            what = (
                f"{numbered(wrong)}: {name} of the {words} differs from the reference by "
                f"{max(wrong.values()):.1e}; rounding explains {allowed:.0e}"
            )
            yield _problem(what, sorted(wrong), everywhere=len(wrong) == len(every))


def _problem(what: str, devices: list[int], everywhere: bool) -> Problem:
    if everywhere:
        return Problem(
            what,
            "The kernel, or the compiler's program for it, is wrong on this chip.",
            "Use Keras's layers, or keras.config.disable_flash_attention(), and report it with the "
            "output of `ktd --version`.",
            tuple(devices),
        )
    return Problem(
        what,
        "These devices compute wrong results, or got the data of other devices.",
        LEAVE_OUT,
        tuple(devices),
    )


def _words(what: str, reference: str, gaps: dict[str, float], problems: list) -> str:
    if problems or not gaps:
        return f"{what}, against {reference}"
    return f"{what}: same as {reference} within {max(gaps.values()):.0e}"
