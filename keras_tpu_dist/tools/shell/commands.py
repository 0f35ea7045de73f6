"""The commands. Each returns an answer, which can be printed, and an exit code."""

import logging
import os
import secrets
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint import CheckpointError, restore
from keras_tpu_dist.checkpoint.contents import contents
from keras_tpu_dist.checkpoint.slots import build_optimizer
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import Topology, all_names
from keras_tpu_dist.layers import convert
from keras_tpu_dist.layers.experts import is_routed
from keras_tpu_dist.processes import initialize
from keras_tpu_dist.show.page import file_of
from keras_tpu_dist.show.progress import show_progress, stages
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.tools.replay import verify
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.shell import given, light
from keras_tpu_dist.tools.shell.light import Answered
from keras_tpu_dist.tools.shell.results import Converted, SliceTable

logger = logging.getLogger("keras_tpu_dist")


def check_page(options: Namespace) -> None:
    """Raises an error if the page cannot be written, before minutes of work.

    Args:
        options: The options of a command with `--html`.
    """
    if options.html is not None:
        file_of(options.html)


def with_page(options: Namespace, answer: Any) -> Any:
    """Writes an answer as a page if `--html` is given, and returns it.

    Args:
        options: The options of a command with `--html`.
        answer: The answer.
    """
    if options.html is not None:
        answer.to_html(options.html)
    return answer


def _topologies(options: Namespace) -> Answered:
    slices = [Topology.parse(name) for name in all_names()]
    return SliceTable(tuple(s for s in slices if options.chip in (None, s.chip.name))), 0


def _asked(options: Namespace, *names: str) -> dict[str, Any]:
    """The inputs, and other options, as keyword arguments of their names."""
    return {**given.inputs_of(options), **{name: getattr(options, name) for name in names}}


def _dry_run(options: Namespace) -> Answered:
    check_page(options)
    with show_progress():
        result = dryrun.dry_run(
            given.build_function(options.build),
            given.strategy_of(options),
            **_asked(options, "batch_size", "rows", "mode", "effort", "timeout", "verify"),
        )
    wrong = result.verification is not None and not result.verification.equal
    return with_page(options, result), int(result.fits is False or wrong)


def _verify(options: Namespace) -> Answered:
    check_page(options)
    with show_progress():
        found = verify(
            given.build_function(options.build),
            given.strategy_of(options),
            **_asked(options, "batch_size", "mode", "steps", "as_on_chip", "timeout"),
        )
    return with_page(options, found), 0 if found.equal else 1


def _search(options: Namespace) -> Answered:
    check_page(options)
    with show_progress():
        found = searching.search(
            given.build_function(options.build),
            [name.strip() for name in options.topology.split(",")],
            options.batch_size,
            price_per_chip_hour=given.prices_of(options.price),
            **_asked(options, "compilations", "exact"),
            budget_s=options.budget,
            cache=False if options.no_cache else True if options.cache is None else options.cache,
        )
    return with_page(options, found), 1 if found.best is None else 0


def _check(options: Namespace) -> Answered:
    check_page(options)
    if options.pod:
        initialize()
    given.simulate_devices(options)
    strategy = given.strategy_of(options)
    model = None
    if options.build is not None:
        if options.pod:
            # Otherwise each process draws other weights, and the check reports it.
            keras.utils.set_random_seed(0)
        with strategy.scope():
            model = given.model_of(options.build, options.command)
    with show_progress():
        found = strategy.check(
            model,
            **_asked(options, "batch_size", "minutes"),
        )
    if jax.process_index() > 0:
        # All processes have the same result, and the first one prints it. If another process fails,
        # the first one ends before this line.
        return None, 0
    return with_page(options, found), 0 if found.ok else 1


def _explain(options: Namespace) -> Answered:
    model, strategy = given.model_and_strategy(options)
    return strategy.explain(model, options.path), 0


def _convert(options: Namespace) -> Answered:
    if not options.output.endswith(".keras"):
        raise value_error(
            "convert writes a .keras file.",
            received={"output": options.output},
            fix="Give the file this ending.",
        )
    file_of(options.output)  # so that a bad path is an error before the work, not after it
    with show_progress(), stages("convert", 3) as begin:
        begin("reading")
        of_file = options.model.endswith(".keras")
        model: Any = (
            keras.saving.load_model(options.model)
            if of_file
            else given.model_of(options.model, options.command)
        )
        begin("converting")
        faster = convert(model)
        layers = tuple(_converted_layers(model, faster))
        if layers:
            begin(f"writing {options.output}")
            build_optimizer(faster)  # Keras looks for its slots when it loads the file
            _write_whole(options.output, faster.save)
    return Converted(model.name, layers, options.output if layers else None), 0 if layers else 1


def _converted_layers(model: Any, faster: Any) -> list[tuple[str, str]]:
    """Paths and classes of the layers that were replaced."""
    return [
        (after.path or after.name, f"{type(after).__module__}.{type(after).__qualname__}")
        for before, after in _keras.paired_layers(model, faster)
        if type(before) is not type(after) or is_routed(after) > is_routed(before)
    ]


def _checkpoint(options: Namespace) -> Answered:
    try:
        if options.to_keras is not None:
            return _as_keras_file(options), 0
        return contents(options.directory), 0
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _as_keras_file(options: Namespace) -> Any:
    """Writes a checkpoint as a Keras file, and returns the loaded weights."""
    file_of(options.to_keras)
    with show_progress(), stages("checkpoint", 3) as begin:
        begin("building")
        model = given.model_of(options.build or "", options.command)
        begin("reading")
        report = restore(model, options.directory, options.step, base=options.base)
        begin(f"writing {options.to_keras}")
        save = model.save if options.to_keras.endswith(".keras") else model.save_weights
        _write_whole(options.to_keras, save)
    return report


def _write_whole(path: str, save: Callable[[str], Any]) -> None:
    """Writes a new file, then replaces the old one, so that Ctrl-C leaves no partial file."""
    file = file_of(path)
    part = file.with_name(f".{secrets.token_hex(8)}.{file.name}")
    try:
        save(str(part))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


COMMANDS: dict[str, Callable[[Namespace], Answered]] = {
    "topologies": _topologies,
    "search": _search,
    "dry-run": _dry_run,
    "verify": _verify,
    "check": _check,
    "explain": _explain,
    "convert": _convert,
    "checkpoint": _checkpoint,
    **light.COMMANDS,
}
