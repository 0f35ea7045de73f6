"""The base of a run's checkpoints: compares what they leave out with the model, and loads it."""

import os
from collections.abc import Sequence
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.barriers import FIX, in_all
from keras_tpu_dist.checkpoint.keeping import has_parts
from keras_tpu_dist.checkpoint.keras_files import is_file_of_keras, load_file
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved
from keras_tpu_dist.checkpoint.matching import weights_there
from keras_tpu_dist.checkpoint.reader import CheckpointReader, folder, none_in
from keras_tpu_dist.checkpoint.restored import assign_saved
from keras_tpu_dist.checkpoint.trained import numbers_of, weights_text
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.paths import plain_path
from keras_tpu_dist.processes.channel import agree

_LeftOut = Sequence[tuple[Saved, Any]]
_KINDS = (
    "a .keras or .weights.h5 file, a directory of checkpoints or one of its steps "
    '("run7/1500"), or a preset of KerasHub'
)
_MOST_NAMED = 3


def check_base(
    models: Sequence[Any],
    left_out: _LeftOut,
    manifest: Manifest,
    where: str,
    source: str | None,
    alone: bool = False,
) -> None:
    """Checks that models have what a checkpoint leaves out; if not, loads the base first.

    Args:
        models: The models.
        left_out: What the checkpoint leaves out, with the variables.
        manifest: The checkpoint's manifest.
        where: The checkpoint, for errors.
        source: What the user gave as `base`, if anything.
        alone: Whether this process reads without the others, if there are several.

    Raises:
        ValueError: In all processes, if one of them has other values.
    """
    other = _differing(left_out, where, alone)
    if other and source is not None:
        try:
            _load_base(models, source, other, alone)
        except CheckpointError as error:
            # Not as such: that would have the checkpoint before this one tried.
            raise value_error(
                f"The base that {where} needs must be there, and readable.",
                received=f"base={source!r}: {error}",
                fix=f"Give {_KINDS}.",
            ) from error
        other = _differing(left_out, where, alone)
    if other:
        raise ValueError(_other_base(other, len(left_out), manifest, where, source))


def _differing(left_out: _LeftOut, where: str, alone: bool) -> _LeftOut:
    """What has another value in a model than in the base, in any process."""
    numbers = numbers_of([variable for _, variable in left_out])
    places = [
        i
        for i, ((saved, _), (number, _)) in enumerate(zip(left_out, numbers, strict=True))
        if saved.fingerprint != number
    ]
    of_all = [places] if alone else agree(f"comparing the base of {where}", FIX, places)
    return [left_out[i] for i in sorted({i for of_one in of_all for i in of_one})]


def _other_base(
    other: _LeftOut, count: int, manifest: Manifest, where: str, source: str | None
) -> str:
    paths = [_text(saved, variable) for saved, variable in other[:_MOST_NAMED]]
    more = " and others" if len(other) > _MOST_NAMED else ""
    noted = "" if manifest.base is None else f", of a run with base={manifest.base!r}"
    first = "" if source is None else f"after base={source!r} was loaded, "
    return message(
        f"{where[:1].upper()}{where[1:]} leaves out {weights_text(count)} of a frozen base{noted}, "
        "and the model must have the values that the run began with.",
        received=f"{first}other values of {len(other)}: {', '.join(paths)}{more}.",
        fix="Load that base into the model before, or name it with base=: "
        + (_KINDS if source is None else f"another one of {_KINDS}")
        + ".",
    )


def _text(saved: Saved, variable: Any) -> str:
    there, here = saved.entry.dtype, str(variable.dtype)
    return repr(variable.path) + (f" ({there} there, {here} here)" if there != here else "")


def _load_base(models: Sequence[Any], source: str, wanted: _LeftOut, alone: bool) -> None:
    """Loads the base into those models that have other values of what is left out."""
    ids = {id(variable) for _, variable in wanted}
    lacking = [model for model in models if any(id(v) in ids for v in model.variables)]
    path = plain_path(source)
    for model in lacking:
        if is_file_of_keras(path):
            _load_file(model, path, ids, alone)
        elif _is_preset(path):
            backbone = _backbone_of(model, source)
            _load_file(backbone, _keras.weights_of_preset(path), ids, alone)
        else:
            _load_step(model, path, ids, alone)


def _load_file(model: Any, path: str, ids: set[int], alone: bool) -> None:
    # Keras's files have all of a model, and a layer with LoRA sets its factors to zero when it
    # loads: what the checkpoint holds gets its values back, if the base is not the right one.
    others = [(v, v.value) for v in model.variables if id(v) not in ids]
    load_file(model, path, strict=False, exclude=(), alone=alone, optimizer=False)
    for variable, value in others:
        variable.assign(value)


def _load_step(model: Any, path: str, ids: set[int], alone: bool) -> None:
    def opened() -> tuple[CheckpointReader, int | None]:
        parent, name = os.path.split(path.rstrip("/"))
        if name.isdigit() and has_parts(folder(path)):
            return CheckpointReader(parent or ".", alone=alone), int(name)
        return CheckpointReader(path, alone=alone), None

    reader, step = in_all(f"opening {path}", opened, alone=alone)
    steps = reader.agreed_steps(step)
    if not steps:
        raise none_in(reader.directory)
    pairs = weights_there(model, reader.agreed_manifest(steps[-1]))
    chosen = [(saved, v) for saved, v in pairs if id(v) in ids and not saved.left_out]
    assign_saved(reader, steps[-1], chosen, False)


def _is_preset(path: str) -> bool:
    """Whether it is a preset of KerasHub: a folder of one, or the name of one."""
    if path.startswith("gs://") or os.path.isdir(path):
        return os.path.isfile(os.path.join(path, _keras.CONFIG_OF_PRESET))
    return True


def _backbone_of(model: Any, source: str) -> Any:
    """The backbone of KerasHub in a model."""
    found = _keras.backbones_in(model)
    if len(found) == 1:
        return found[0]
    raise value_error(
        "The base of a checkpoint is a file, a directory, or a preset for a model of KerasHub.",
        received={"base": source, "backbones of KerasHub in the model": len(found)},
        fix=f"Check the path, or give {_KINDS}.",
    )
