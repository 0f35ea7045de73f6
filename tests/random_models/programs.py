"""Runs a program, on one device without a strategy or on a mesh, and says what came of it."""

import contextlib
import warnings
from functools import partial
from typing import Any

import feeds
import keras
import later
import numpy as np
import small_models
from options import Program
from precision import in_float64

import keras_tpu_dist as ktd

MESHES = {
    "8": {"data": 8},
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "model": 2},
    "2x2t2": {"data": 2, "sequence": 2, "model": 2},
    "t2x4": {"sequence": 2, "data": 4},
}
EPOCHS = 2
# Relative to the largest value of each array. Three bits of bfloat16's eight are lost by rounding
# in another order; a lost row or a wrong gradient is far beyond.
TOLERANCES = {"float32": 1e-5, "float64": 1e-6, "mixed_bfloat16": 5e-2}


def compared(program: Program) -> dict[str, Any]:
    """Whether a program gives on its mesh what it gives on one device, and the difference."""
    policy = program.choices["policy"]
    difference, where = _difference(program)
    if difference <= TOLERANCES[policy]:
        return {"right": True, "difference": difference, "where": where}
    # Rounding, amplified by training, is gone in float64; a fault is not.
    program = Program(program.seed, {**program.choices, "policy": "float64"})
    with in_float64():
        precise, there = _difference(program)
    where = f"{where} ({precise:.1e} at {there} in float64)"
    return {
        "right": precise <= TOLERANCES["float64"],
        "difference": difference,
        "where": where,
    }


def _difference(program: Program) -> tuple[float, str]:
    expected, found = results(program, False), results(program, True)
    assert found.keys() == expected.keys(), f"{list(found)} and {list(expected)}"
    gaps = {name: _gap(found[name], expected[name]) for name in expected}
    name = max(gaps, key=gaps.get)
    return gaps[name], name


def _gap(found: np.ndarray, expected: np.ndarray) -> float:
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape, f"{found.shape} and {expected.shape}"
    assert np.all(np.isfinite(expected)), "the program itself is not finite"
    gap = np.max(np.abs(found - expected), initial=0.0)
    gap = gap / max(np.max(np.abs(expected), initial=0.0), 1e-2)
    return float("inf") if np.isnan(gap) else float(gap)


def results(program: Program, on_mesh: bool) -> dict[str, np.ndarray]:
    """Histories, weights, optimizer steps, evaluation and predictions of a program."""
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(program.seed)
    keras.config.set_dtype_policy(program.choices["policy"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(program, _strategy(program) if on_mesh else None)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.distribution.set_distribution(None)


def _strategy(program: Program) -> ktd.TPUStrategy:
    choices = program.choices
    mesh = MESHES[choices["mesh"]]
    layout = choices["layout"]
    if layout == "tensor_parallel" and "model" not in mesh:
        layout = "fsdp"
    if layout == "rules":
        axis = "model" if "model" in mesh else "data"
        layout = [(r"/wide.*/kernel$", (None, axis)), (r"/narrow.*/kernel$", (axis, None))]
    return ktd.TPUStrategy(
        mesh,
        None if layout == "none" else layout,
        donate_state=choices["donate_state"],
        prefetch=choices["prefetch"],
        shard_optimizer=choices["shard_optimizer"],
        remat=choices["remat"],
    )


def _run(program: Program, strategy: Any) -> dict[str, np.ndarray]:
    choices = program.choices
    scope = contextlib.nullcontext if strategy is None else strategy.scope

    def build() -> keras.Model:
        # "moved": a model built before its scope, which then moves onto the mesh.
        with contextlib.nullcontext() if choices["where"] == "moved" else scope():
            return _compiled(program, strategy)

    model = build()
    inside = choices["where"] in ("inside", "moved")
    with scope() if inside else contextlib.nullcontext():
        found = _trained(program, model, strategy)
        if choices["then"] != "nothing":
            keras.utils.set_random_seed(program.seed + 1)
            model = later.changed(
                choices["then"], model, build, partial(_compile, program, strategy)
            )
            again = _trained(program, model, strategy)
            found |= {f"then {name}": value for name, value in again.items()}
    return found


def _trained(program: Program, model: keras.Model, strategy: Any) -> dict[str, np.ndarray]:
    data = feeds.Data(program, model)
    if program.choices["trainer"] == "on_batch":
        return _trained_on_batches(data, model)
    history = model.fit(
        **data.of_fit(),
        epochs=EPOCHS,
        callbacks=_callbacks(program.choices["callbacks"], strategy is not None),
        shuffle=program.choices["shuffle"],
        verbose=0,
    ).history
    found = {f"history {name}": np.asarray(values) for name, values in history.items()}
    found |= _state(model)
    evaluated = model.evaluate(**data.of_evaluate(), verbose=0, return_dict=True)
    found |= {f"evaluate {name}": np.asarray(value) for name, value in evaluated.items()}
    return found | _named("predict", model.predict(**data.of_predict(), verbose=0))


def _trained_on_batches(data: feeds.Data, model: keras.Model) -> dict[str, np.ndarray]:
    """A loop of the user's own over batches, in the place of fit, evaluate and predict."""
    found: dict[str, np.ndarray] = {}
    for epoch in range(EPOCHS):
        for number, batch in enumerate(data.of_train_on_batch()):
            logs = model.train_on_batch(**batch, return_dict=True)
            found |= _named(f"trained on {number} of {epoch}", logs)
        model.reset_metrics()
    found |= _state(model)
    for number, batch in enumerate(data.of_train_on_batch()):
        batch.pop("class_weight", None)
        found |= _named(f"tested on {number}", model.test_on_batch(**batch, return_dict=True))
        found |= _named(f"predicted {number}", model.predict_on_batch(batch["x"]))
    return found


def _named(name: str, structure: Any) -> dict[str, np.ndarray]:
    return {f"{name} {i}": np.asarray(a) for i, a in enumerate(keras.tree.flatten(structure))}


def _state(model: keras.Model) -> dict[str, np.ndarray]:
    found = {f"{i} {v.path}": np.asarray(v.value) for i, v in enumerate(model.weights)}
    return {**found, "iterations": np.asarray(model.optimizer.iterations)}


def _callbacks(kind: str, on_mesh: bool) -> list:
    if kind == "batches":
        return [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)]
    if kind == "name_nan" and on_mesh:
        return [ktd.callbacks.NameNaN()]
    if kind == "early_stopping":
        return [keras.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)]
    return []


def _compiled(program: Program, strategy: Any) -> keras.Model:
    choices = program.choices
    model = small_models.MODELS[choices["model"]]()
    if choices["trainer"] == "compute_loss":
        model = small_models.Penalized(model.input, model.output)
    if strategy is not None and choices["blocks"] == "scanned":
        assert ktd.scan_blocks(model).runs
    _compile(program, strategy, model)
    return model


def _compile(program: Program, strategy: Any, model: keras.Model) -> None:
    choices = program.choices
    # Stock Keras loses steps where launches of several do not fill an epoch.
    steps = 1 if strategy is None else choices["steps_per_execution"]
    classes = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=choices["reduction"]
    )
    goal: dict[str, Any] = {"loss": classes, "metrics": _metrics()}
    if choices["weighted"] == "sample_weight":
        goal["weighted_metrics"] = ["accuracy"]
    if isinstance(model.output, dict):
        value = keras.losses.Huber(reduction=choices["reduction"])
        goal = {name: {"class": each, "value": None} for name, each in goal.items()}
        goal["loss"]["value"] = value
        goal["metrics"]["value"] = ["mae"]
        goal["loss_weights"] = {"class": 1.0, "value": 0.3}
    model.compile(
        _OPTIMIZERS[choices["optimizer"]](_RATES.get(choices["reduction"], 0.1)),
        **goal,
        steps_per_execution=steps,
        run_eagerly=choices["run_eagerly"],
    )


def _metrics() -> list:
    return ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="two")]


# Adam divides by what it measured, so that rounding counts as much as the gradient where that is
# small: epsilon keeps it from it.
_OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "adam": lambda rate: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "clipped": lambda rate: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5),
    "accumulated": lambda rate: keras.optimizers.SGD(rate, gradient_accumulation_steps=2),
    "averaged": lambda rate: keras.optimizers.SGD(rate, use_ema=True, ema_overwrite_frequency=2),
    "scaled": lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)),
}
# A sum over a batch of rows and tokens would end in infinity at the rate of their mean.
_RATES = {"sum": 0.002}
