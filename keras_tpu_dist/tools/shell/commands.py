"""The commands. Each returns an answer, which can be printed, and an exit code."""

import logging
import os
import secrets
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint import CheckpointError, restore
from keras_tpu_dist.checkpoint.contents import contents
from keras_tpu_dist.checkpoint.restored import build_optimizer
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import Topology, all_names
from keras_tpu_dist.layers import convert
from keras_tpu_dist.layers.experts import is_routed
from keras_tpu_dist.processes import initialize
from keras_tpu_dist.show.page import file_of
from keras_tpu_dist.show.progress import show_progress, stages
from keras_tpu_dist.tools.checkup.calibrated import chip_of
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.tools.dryrun.report import DryRun
from keras_tpu_dist.tools.replay import verify
from keras_tpu_dist.tools.searches import compare as comparison
from keras_tpu_dist.tools.searches import largest_batch as largest
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.searches.ranking import Ranking
from keras_tpu_dist.tools.searches.slices import compare_slices
from keras_tpu_dist.tools.shell import given, light
from keras_tpu_dist.tools.shell.light import Answered, check_page, with_page
from keras_tpu_dist.tools.shell.results import Converted, DeviceTable, SliceTable

logger = logging.getLogger("keras_tpu_dist")


def _topologies(options: Namespace) -> Answered:
    slices = [Topology.parse(name) for name in all_names()]
    return SliceTable(tuple(s for s in slices if options.chip in (None, s.chip.name))), 0


def _devices(options: Namespace) -> Answered:
    rows = (
        (str(d.id), d.platform, d.device_kind, str(getattr(d, "coords", "")), str(d.process_index))
        for d in jax.devices()
    )
    return DeviceTable(tuple(rows)), 0


def _asked(options: Namespace, *names: str) -> dict[str, Any]:
    """The inputs, and other options, as keyword arguments of their names."""
    return {**given.inputs_of(options), **{name: getattr(options, name) for name in names}}


def _dry_run(options: Namespace) -> Answered:
    check_page(options)
    with show_progress():
        result = dryrun.dry_run(
            given.build_function(options.build),
            given.strategy_of(options),
            **_asked(options, "batch_size", "mode", "effort", "timeout", "calibration", "verify"),
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


def _largest_batch(options: Namespace) -> Answered:
    check_page(options)
    with show_progress():
        found = largest.largest_batch(
            given.build_function(options.build),
            given.strategy_of(options),
            **_asked(
                options,
                "mode",
                "effort",
                "tolerance",
                "max_compiles",
                "timeout",
                "calibration",
            ),
        )
    _warn_of_unused_axes([found.run])
    return with_page(options, found), 0 if found.batch_size else 1


def _search(options: Namespace) -> Answered:
    build = given.build_function(options.build)
    cache = False if options.no_cache else True if options.cache is None else options.cache

    def one(topology: Topology) -> Ranking:
        return searching.search(
            build,
            topology,
            options.batch_size,
            **_asked(options, "compilations", "exact", "calibration"),
            budget_s=options.budget,
            cache=cache,
        )

    return _ranked(options, "search", one)


def _compare(options: Namespace) -> Answered:
    build = given.build_function(options.build)
    meshes = [given.mesh_of(text) or {} for text in options.mesh or ["data=-1"]]
    layouts = [given.layout_of(text) for text in options.layout or ["none"]]

    def one(topology: Topology) -> Ranking:
        return comparison.compare(
            build,
            topology=topology,
            meshes=meshes,
            layouts=layouts,
            **_asked(options, "batch_size", "mode", "timeout", "calibration"),
        )

    return _ranked(options, "compare", one)


def _ranked(options: Namespace, work: str, one: Callable[[Topology], Ranking]) -> Answered:
    """The ranking for one slice, for several, or for one with a price."""
    check_page(options)
    price = given.price_of(options.price)
    topologies = given.topologies_of(options.topology)
    rankings = []
    with show_progress(), stages(work, len(topologies)) as begin:
        for topology in topologies:
            begin(topology.name)
            rankings.append(one(topology))
    _warn_of_unused_axes(tried.run for ranking in rankings for tried in ranking.compiled)
    several = len(rankings) > 1 or price is not None
    found = compare_slices(rankings, price=price) if several else rankings[0]
    return with_page(options, found), 1 if found.best is None else 0


def _check(options: Namespace) -> Answered:
    check_page(options)
    if options.pod:
        initialize()
    given.simulate_devices(options)
    strategy = given.strategy_of(options)
    if options.calibration is not None:
        file_of(options.calibration)
        chip_of(strategy.mesh.devices.flat[0].device_kind)
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
    if options.calibration is not None:
        found.calibration().save(options.calibration)
    return with_page(options, found), 0 if found.ok else 1


def _lint(options: Namespace) -> Answered:
    model, strategy = given.model_and_strategy(options)
    report = strategy.lint(model, batch_size=options.batch_size)
    return report, 0 if report.ok else 1


def _explain(options: Namespace) -> Answered:
    model, strategy = given.model_and_strategy(options)
    return strategy.explain(model, options.path), 0


def _show(options: Namespace) -> Answered:
    if options.build is None:
        given.simulate_devices(options)
        picture = given.strategy_of(options).show()
    else:
        model, strategy = given.model_and_strategy(options)
        picture = strategy.show(model)
    if options.save is not None:
        picture.save(options.save)
    return picture, 0


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
    pairs = zip(_keras.flatten_layers(model), _keras.flatten_layers(faster), strict=True)
    return [
        (after.path or after.name, f"{type(after).__module__}.{type(after).__qualname__}")
        for before, after in pairs
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
        report = restore(model, options.directory, options.step)
        begin(f"writing {options.to_keras}")
        save = model.save if options.to_keras.endswith(".keras") else model.save_weights
        _write_whole(options.to_keras, save)
    return report


def _warn_of_unused_axes(runs: Iterable[DryRun | None]) -> None:
    """Warns once about mesh axes over which nothing is split, like the report of a dry run."""
    findings = {f for run in runs if run is not None for f in run.findings}
    for finding in sorted(findings, key=str):
        if finding.code == "unused-axis":
            logger.warning("mesh axis %r: %s %s", finding.path, finding.words, finding.fix)


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
    "devices": _devices,
    "search": _search,
    "compare": _compare,
    "dry-run": _dry_run,
    "largest-batch": _largest_batch,
    "verify": _verify,
    "check": _check,
    "lint": _lint,
    "explain": _explain,
    "show": _show,
    "convert": _convert,
    "checkpoint": _checkpoint,
    **light.COMMANDS,
}
