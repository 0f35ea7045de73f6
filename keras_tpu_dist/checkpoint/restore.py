"""Loads a checkpoint into a model on any mesh: all of it, or one clear error."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.barriers import in_all
from keras_tpu_dist.checkpoint.base import check_base
from keras_tpu_dist.checkpoint.beside import load_beside
from keras_tpu_dist.checkpoint.compiled import (
    compiled_of,
    follow_compiled,
    has_trained,
)
from keras_tpu_dist.checkpoint.keras_files import (
    check_not_of_keras,
    is_file_of_keras,
    load_file,
)
from keras_tpu_dist.checkpoint.lora_files import is_lora_file, load_lora_file
from keras_tpu_dist.checkpoint.manifest import Manifest, Saved, checkpoint_error
from keras_tpu_dist.checkpoint.matching import apart, pairs_of, weights_of
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    Matching,
    automatic_names,
    match,
    named_state,
)
from keras_tpu_dist.checkpoint.optimizers import Fitting, fitting, kinds_of_optimizers
from keras_tpu_dist.checkpoint.reader import CheckpointReader, none_in
from keras_tpu_dist.checkpoint.restored import (
    Restored,
    assign_saved,
)
from keras_tpu_dist.checkpoint.slots import begin_slots, build_optimizer
from keras_tpu_dist.checkpoint.trained import Base
from keras_tpu_dist.common.checks import FLAG, check_model, checked_path, require, whole
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.patterns import patterns_of
from keras_tpu_dist.training import membership

logger = logging.getLogger("keras_tpu_dist")

_WHERE = 'Write for example ktd.restore(model, "checkpoints").'


def restore(
    model: Any,
    directory: str | os.PathLike,
    step: int | None = None,
    strict: bool = True,
    exclude: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] | Mapping[str, str] = (),
    base: str | os.PathLike | None = None,
) -> Restored:
    """Loads a checkpoint into a model, straight into the shards of its mesh.

    The checkpoint may come from any mesh, any number of processes and any layout. The checksums of
    all values are checked before anything in the model changes, if the model has trained or the
    state has at most 128 MiB; otherwise in groups of 64 MiB. The optimizer's state is loaded, too,
    if all weights are. Of an optimizer that has not trained yet, what is not loaded begins with the
    loaded weights, also if it was built before; your learning rate stays. One that has trained
    stays as it is, as in Keras, if nothing of it is loaded.

    Args:
        model: A built model.
        directory: The directory of `keras_tpu_dist.callbacks.Checkpoint`; or a file that Keras
            saved: a `.keras`, `.weights.h5` or sharded `.weights.json`; or a `.lora.h5` of
            KerasHub's `save_lora_weights`.
        step: The checkpoint's step. Defaults to the newest complete one.
        strict: Whether the model and the checkpoint must have exactly the same weights.
        exclude: Patterns of paths to leave unchanged, such as `"*/head/*"`.
        rename: Pairs `(regular expression, replacement)` for saved paths, or a dict of them.
        base: Where the weights are that a checkpoint with `only="trained"` leaves out: a `.keras`
            or weights file, a directory of checkpoints or one of its steps (`"run7/1500"`), or a
            preset of KerasHub. It is loaded first if the model has other values.

    Returns:
        A report of the loaded and the unchanged variables; print it.

    Raises:
        ValueError: If the model is not built, or the checkpoint does not fit: one error with every
            path that is missing, unexpected, or has another shape or kind of dtype; or if the model
            has other values of what the checkpoint leaves out.
        CheckpointError: If there is no such checkpoint, or it is not complete.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = ktd.callbacks.Checkpoint(folder, every_epochs=1)
    ...     _ = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[saved])
    ...     report = ktd.restore(model, folder)
    >>> report.step, report.kept
    (1, ())
    """
    check_model(model, "restore")
    require("restore", FLAG, strict=strict)
    require("restore", whole(0), True, step=step)
    directory = checked_path("restore", _WHERE, directory=directory)
    pairs, exclude = _checked_pairs(rename), patterns_of(exclude)
    alone = membership.is_local(model)
    source = None if base is None else checked_path("restore", _WHERE, base=base)
    if is_file_of_keras(directory) or is_lora_file(directory):
        _check_built(model)
        _check_of_files(step, pairs, source)
        if is_lora_file(directory):
            return load_lora_file(model, directory, exclude, alone)
        return load_file(model, directory, strict, exclude, alone)

    def opened() -> CheckpointReader:
        check_not_of_keras(directory)
        return CheckpointReader(directory, alone=alone)

    what = f"opening {directory}"
    reader = in_all(what, opened, alone=alone)
    return load_newest(model, reader, step, strict, exclude, pairs, base=Base(source))[0]


def load_newest(
    model: Any,
    reader: CheckpointReader,
    step: int | None = None,
    strict: bool = True,
    exclude: tuple[str, ...] = (),
    rename: tuple[tuple[str, str], ...] = (),
    needs: tuple[str, ...] = (),
    base: Base | None = None,
) -> tuple[Restored, Manifest]:
    """Loads the newest complete checkpoint, or that of a step. See `restore`.

    Args:
        model: A built model.
        reader: The checkpoints.
        step: The step, or `None` for the newest.
        strict: See `restore`.
        exclude: See `restore`.
        rename: See `restore`.
        needs: The entries that the manifest's `training` must have.
        base: The base of what the checkpoint leaves out; afterwards it is that of the run.
    """
    _check_built(model)
    base = base or Base()

    def load(candidate: int) -> tuple[Restored, Manifest]:
        manifest = reader.agreed_manifest(candidate)
        _check_has(manifest, needs, f"Checkpoint {candidate} of {reader.directory!r}")
        return _load(model, reader, candidate, manifest, strict, exclude, rename, base), manifest

    loaded = reader.load_newest(load, step)
    if loaded is None:
        raise none_in(reader.directory)
    return loaded


def _check_has(manifest: Manifest, needs: tuple[str, ...], where: str) -> None:
    lacking = [name for name in needs if name not in manifest.training]
    if lacking:
        raise checkpoint_error(
            f"{where} has no state of a fit.",
            received=f"a manifest without {', '.join(lacking)}.",
            fix="Load the weights alone: ktd.restore(model, directory).",
        )


def _load(
    model: Any,
    reader: CheckpointReader,
    step: int,
    manifest: Manifest,
    strict: bool,
    exclude: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    base: Base,
) -> Restored:
    where = f"checkpoint {step} of {reader.directory!r}"
    state = named_state(model)
    automatic = automatic_names([model])
    matched = weights_of(model, state, manifest, exclude, rename)
    if matched is None:
        raise ValueError(_one_of_several(reader, step, model, manifest))
    weights, among = matched
    if strict and not weights.complete:
        raise ValueError(_misfit(reader, step, weights))
    matched = pairs_of(state, manifest, WEIGHTS, weights.pairs)
    pairs, left_out = apart(matched)
    check_base([model], left_out, manifest, where, base.source, reader.alone)
    base.resume(left_out)
    others = []
    optimizer = getattr(model, "optimizer", None)
    before = compiled_of(optimizer), has_trained(optimizer)
    if weights.complete and not weights.kept:
        if manifest.arrays.get(OPTIMIZER):
            build_optimizer(model)
        others = _others(optimizer, named_state(model), manifest, weights, automatic)
    assign_saved(reader, step, [*pairs, *others], before[1])
    has_optimizer = any(saved.key.startswith(OPTIMIZER) for saved, _ in others)
    if has_optimizer:
        follow_compiled(optimizer, *before, manifest.training.get("compiled"))
    begin_slots(model, [variable for _, variable in others], before[1])
    fitting_here = [variable for _, variable in matched]
    load_beside(
        [model],
        manifest,
        lambda wanted: reader.load(step, wanted),
        fitting_here,
        where,
        rename,
        among,
    )
    _keras.forget_state(model)
    _log_renamed(model, weights)
    return Restored(
        directory=reader.directory,
        step=step,
        loaded=tuple(variable.path for _, variable in pairs),
        kept=(*weights.kept, *weights.missing, *weights.reshaped),
        unused=weights.unexpected,
        renamed=weights.renamed,
        optimizer=has_optimizer,
        base=tuple(variable.path for _, variable in left_out),
    )


def _log_renamed(model: Any, weights: Matching) -> None:
    if weights.renamed:
        logger.info(
            "%d variables of %s were saved with other numbers in their names, and were matched in "
            "order (the first: %s)",
            len(weights.renamed),
            model.name,
            " is ".join(next(iter(weights.renamed.items()))),
        )


def _one_of_several(reader: CheckpointReader, step: int, model: Any, manifest: Manifest) -> str:
    names = [name for name, _ in manifest.objects(WEIGHTS)]
    return message(
        f"Checkpoint {step} of {reader.directory!r} has {len(names)} models, and which one to load "
        "must be clear: by the model's name, or because the weights of one alone fit.",
        received={"model": model.name, "saved models": names},
        fix="Load all as they were saved: ktd.LoopCheckpoint(directory, first, second).restore(). "
        "To load one alone, name the models before they are saved: Sequential(..., name=...).",
    )


def _others(
    optimizer: Any,
    state: dict,
    manifest: Manifest,
    weights: Matching,
    automatic: frozenset[str],
) -> list[tuple[Saved, Any]]:
    """Pairs for slots and the optimizer's other variables that fit, and for metrics if all do."""
    saved = manifest.entries(WEIGHTS)
    sources = [(state[WEIGHTS][i][0], saved[j]) for i, j in weights.pairs.items()]
    here = {kind: [entry for entry, _ in state[kind]] for kind in (SLOTS, OPTIMIZER, METRICS)}
    there = manifest.automatic
    pairs: list[tuple[Saved, Any]] = []
    if here[OPTIMIZER] and manifest.arrays.get(OPTIMIZER):
        kinds = kinds_of_optimizers([optimizer])
        fits = fitting(here, manifest, kinds, sources, automatic, there)
        pairs += pairs_of(state, manifest, SLOTS, fits.slots)
        pairs += pairs_of(state, manifest, OPTIMIZER, fits.rest.pairs)
        saved_by = manifest.written.get("optimizer")
        if not pairs:
            logger.warning(
                "the optimizer's state is not loaded: %s saved it, and it does not fit", saved_by
            )
        elif not fits.whole or len(fits.slots) < len(manifest.entries(SLOTS)):
            _say_what_is_left(optimizer, saved_by, here, manifest, fits)
    metrics = match(
        here[METRICS], manifest.entries(METRICS), automatic=automatic, automatic_there=there
    )
    if metrics.complete:
        pairs += pairs_of(state, manifest, METRICS, metrics.pairs)
    return pairs


def _say_what_is_left(
    optimizer: Any, saved_by: Any, here: dict, manifest: Manifest, fits: Fitting
) -> None:
    used = set(fits.slots.values())
    begin = {entry.slot for i, entry in enumerate(here[SLOTS]) if i not in fits.slots}
    unused = {entry.slot for j, entry in enumerate(manifest.entries(SLOTS)) if j not in used}
    lacking = {path.rpartition("/")[0].rpartition("/")[2] for path in fits.rest.missing}
    logger.warning(
        "the optimizer differs from the saved one (%s, saved by %s): %d of its %d slots are "
        "loaded; %s begin anew, and %s of the checkpoint are not used%s",
        type(optimizer).__name__,
        saved_by,
        len(fits.slots),
        len(here[SLOTS]),
        ", ".join(sorted(begin)) or "none",
        ", ".join(sorted(unused)) or "none",
        f". The counts and rates of {', '.join(sorted(lacking))} stay as they are"
        if lacking
        else "",
    )


def _misfit(reader: CheckpointReader, step: int, weights: Matching) -> str:
    return message(
        f"Checkpoint {step} of {reader.directory!r} must have exactly the weights of this model.",
        received=f"{'; '.join(weights.misfits)}.",
        fix="Pass rename=[(pattern, replacement)] for other names, exclude=[...] to leave weights "
        "unchanged, or strict=False to load only matching weights.",
    )


def _checked_pairs(
    rename: Iterable[tuple[str, str]] | Mapping[str, str],
) -> tuple[tuple[str, str], ...]:
    pairs: tuple[Any, ...] = (rename,)
    if isinstance(rename, Iterable):
        pairs = tuple(rename.items() if isinstance(rename, Mapping) else rename)
    for pair in pairs:
        if not _is_renaming(pair):
            raise value_error(
                "rename needs pairs of a regular expression and its replacement.",
                received={"rename": rename},
                fix='Write for example rename=[("^old/", "new/")].',
            )
    return pairs


def _is_renaming(pair: Any) -> bool:
    two = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not two or not all(isinstance(part, str) for part in pair):
        return False
    try:
        re.compile(pair[0])
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _check_of_files(step: int | None, rename: tuple, base: str | None) -> None:
    if step is not None or rename or base is not None:
        raise value_error(
            "A Keras file has one state, and identifies variables by the model's structure.",
            received={"step": step, "rename": rename, "base": base},
            fix="Leave them out.",
        )


def _check_built(model: Any) -> None:
    if not _keras.is_built(model):
        raise value_error(
            "restore needs a built model.",
            received=f"{model.name!r}, which is not built.",
            fix="Add a keras.Input, or call model.build(input_shape).",
        )
