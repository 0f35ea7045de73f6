"""Which saved weights belong to a model, if a checkpoint has those of one or of several."""

import itertools
from collections.abc import Iterable
from typing import Any

from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import (
    WEIGHTS,
    Matching,
    automatic_names,
    check_excluded,
    match,
    named_state,
    names_of_models,
    renamed,
)


def weights_of(
    model: Any,
    state: dict,
    manifest: Manifest,
    exclude: tuple[str, ...] = (),
    rename: tuple[tuple[str, str], ...] = (),
) -> tuple[Matching, list[int]] | None:
    """The weights of this model; `None` if a loop saved several models, and which is unclear.

    With the number of the model, if it is one of several.
    """
    here, saved = [entry for entry, _ in state[WEIGHTS]], manifest.entries(WEIGHTS)
    paths, models = [entry.path for entry in here], names_of_models([model])
    automatic = automatic_names([model])
    check_excluded(exclude, [*paths, *(renamed(entry.path, rename) for entry in saved)])

    def matched(start: int, stop: int) -> Matching:
        return match(
            here,
            saved[start:stop],
            automatic=automatic,
            automatic_there=manifest.automatic,
            exclude=exclude,
            rename=rename,
            models=models,
        ).moved(0, start)

    whole = matched(0, len(saved))
    objects = manifest.objects(WEIGHTS)
    if len(objects) < 2 or whole.complete:
        return whole, []
    ends = list(itertools.accumulate(count for _, count in objects))
    matchings = [matched(end - count, end) for end, (_, count) in zip(ends, objects, strict=True)]
    chosen = [number for number, matching in enumerate(matchings) if matching.complete]
    if model.name not in automatic:
        named = [number for number, (name, _) in enumerate(objects) if name == model.name]
        chosen = named or chosen
    return (matchings[chosen[0]], chosen) if len(chosen) == 1 else None


def pairs_of(
    state: dict, manifest: Manifest, kind: str, pairs: dict[int, int]
) -> list[tuple[Saved, Any]]:
    """Saved arrays of a kind, with the variables that they are for."""
    saved = manifest.arrays.get(kind, ())
    return [(saved[j], state[kind][i][1]) for i, j in pairs.items()]


def apart(pairs: Iterable[tuple[Saved, Any]]) -> tuple[list, list]:
    """Pairs of `pairs_of` whose values a checkpoint has, and those that it leaves out."""
    every = list(pairs)
    return (
        [pair for pair in every if not pair[0].left_out],
        [pair for pair in every if pair[0].left_out],
    )


def weights_there(model: Any, manifest: Manifest) -> list[tuple[Saved, Any]]:
    """The saved weights of a checkpoint, as many as fit, with the variables of a model."""
    state = named_state(model)
    matched = weights_of(model, state, manifest)
    return [] if matched is None else pairs_of(state, manifest, WEIGHTS, matched[0].pairs)
