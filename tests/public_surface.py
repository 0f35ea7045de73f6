"""What each parameter of the public surface takes, and what it refuses; see test_public_surface.py.

A new public name, method or parameter without a row here fails the test.
"""

import inspect
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from helpers import loaded

import keras_tpu_dist as ktd

made_run = loaded(pathlib.Path(__file__).parent / "dryrun" / "made.py", "surface_made").made_run
NAN, HUGE = float("nan"), 10**30
# Nothing that a parameter of the kind takes. Each error names the rule, what came, and the fix.
FLAG = (None, "no", "True", 2, -1, 0.5, NAN, [], HUGE)
COUNT = (None, "", "3", True, 0, -1, 1.5, NAN, [], {}, HUGE)
COUNT_OR_NONE = COUNT[1:]
INDEX = (None, "", "0", True, -1, 1.5, NAN, [], HUGE)
SECONDS = (None, "", "3", True, -1, 0, NAN, [], float("inf"))
SECONDS_OR_NONE = SECONDS[1:]
PATH = (None, "", 3, True, NAN, [], {})
MODEL = (None, "", "model", 3, True, NAN, [], {}, object())
LAYER = MODEL
TEXT = (None, 3, True, NAN, [], {})
PATTERNS = (None, 3, True, NAN, [3], {"a": 1})
STRATEGY = (None, "fsdp", 3, True, {}, keras.distribution.list_devices)


def word(*near: str) -> tuple:
    """Nothing that a parameter takes which knows some words: these nearly are one."""
    return (*near, "", 3, True, NAN, [], {})


@dataclass(frozen=True)
class Row:
    """A public callable: what its parameters may be, and may not be, or why all is taken."""

    call: Callable[..., Any]
    right: Callable[[], dict[str, Any]] = dict
    wrong: dict[str, Any] = field(default_factory=dict)


def made() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")])
    model.compile("sgd", "mse")
    return model


def ours(module: Any) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module."""
    for name in sorted(dir(module)):
        value = getattr(module, name)
        named = not name.startswith("_") and callable(value)
        if named and getattr(value, "__module__", "").startswith("keras_tpu_dist"):
            yield name, value


# Keras or this package's own loop calls these, with what they make.
HOOKS = ("on_", "before_", "after_", "set_model", "begin_after", "give_back_what_waits", "call")
# This package makes them; whoever makes one is not a user.
RESULTS = (
    "DryRun",
    "Verification",
    "PerReplica",
    "ReplicaContext",
    "DistributedDataset",
    "CheckpointError",
)


def surface() -> dict[str, tuple[str, ...]]:
    """Every public callable with its parameters."""
    found = {}
    for module in (ktd, ktd.layers, ktd.callbacks):
        for name, value in ours(module):
            if name in RESULTS or (module is ktd.layers and not inspect.isclass(value)):
                continue
            found[name] = parameters(value)
            if inspect.isclass(value) and module is not ktd.layers:
                found |= {f"{name}.{m}": parameters(f) for m, f in methods(value)}
    return {name: those for name, those in found.items() if those or name in ROWS}


def methods(kind: type) -> Iterator[tuple[str, Callable]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("keras_tpu_dist"):
            continue
        for name in vars(base):
            member = getattr(kind, name)
            alias = getattr(kind, name.removeprefix("experimental_"), None)
            if name.startswith("experimental_") and member in (alias, vars(base).get(name)):
                continue
            if not name.startswith(("_", *HOOKS)) and inspect.isroutine(member):
                yield name, member


def parameters(function: Callable) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    # Some Pythons, as 3.11.2, take the `__new__` that a class inherits from Keras's layers.
    made = function.__init__ if inspect.isclass(function) else function
    found = inspect.signature(made).parameters.values()
    return tuple(p.name for p in found if p.kind not in kinds and p.name != "self")


def strategy() -> ktd.TPUStrategy:
    return ktd.TPUStrategy({"data": 4, "model": 2})


def loop_over_ones(**given: Any) -> list:
    made = strategy()
    return list(made.loop(**{"dataset": made.distribute_dataset([np.ones(8)]), **given}))


def reduce_ones(**given: Any) -> Any:
    made = strategy()
    return made.reduce(**{"value": made.run(lambda: 1.0), **given})


def loop_checkpoint() -> ktd.LoopCheckpoint:
    return ktd.LoopCheckpoint(tempfile.mkdtemp(), made())


DIRECTORY: list[str] = []  # of one checkpoint; the test makes it


def directory() -> str:
    return DIRECTORY[0]


ANYTHING = "any structure of arrays"

ITS_OWN = "this package calls it"
BUILD = (None, "", "build", 3, True, [], {}, lambda: None, lambda: 3)
OF_DRY_RUNS: dict[str, Any] = {
    **dict.fromkeys(("x", "y", "sample_weight"), ANYTHING),
    **{"sequence_length": COUNT_OR_NONE, "rows": COUNT_OR_NONE},
    **{"build": BUILD, "batch_size": COUNT_OR_NONE, "mode": word("trian", "fit")},
    **{"timeout": SECONDS, "progress": (3, True, "x")},
}


OF_RUNS: dict[str, Any] = {
    "fn": (None, "", "f", 3, True, []),
    "args": (3, True, "x", NAN),
    "kwargs": (3, True, "x", [1]),
    "options": (3, True, "x", {}, []),
    "steps": COUNT,
}


def assignment() -> ktd.DeviceAssignment:
    return ktd.DeviceAssignment.build(computation_shape=[2])


def described() -> ktd.TPUStrategy:
    return ktd.TPUStrategy(topology="v5e:2x2")


ROWS: dict[str, Row] = {
    "freeze": Row(
        ktd.freeze,
        lambda: {"model": made(), "patterns": "*dense*"},
        {"model": MODEL, "patterns": (*PATTERNS, "", "*dnse*"), "exclude": (*PATTERNS, "dnse")},
    ),
    "restore": Row(
        ktd.restore,
        lambda: {"model": made(), "directory": directory()},
        {
            "model": MODEL,
            "directory": PATH,
            "step": ("", "x", True, NAN, -1, 1.5, [], HUGE),
            "strict": FLAG,
            "exclude": PATTERNS,
            "rename": (None, 3, True, "ab", ("a", "b"), [("a", 1)], [("(", "b")], {"a": None}),
            "base": PATH[1:],
        },
    ),
    "checkpoints": Row(
        ktd.checkpoints,
        lambda: {"directory": directory()},
        {"directory": PATH, "timeout_s": SECONDS_OR_NONE},
    ),
    "LoopCheckpoint": Row(
        lambda directory, **k: ktd.LoopCheckpoint(directory, made(), **k).close(),
        lambda: {"directory": directory()},
        {
            "directory": PATH,
            "keep": COUNT_OR_NONE,
            "asynchronous": FLAG,
            "only": word("trainde"),
            "base": PATH[1:],
        },
    ),
    "LoopCheckpoint.save": Row(
        lambda **k: loop_checkpoint().save(**k), lambda: {"step": 1}, {"step": INDEX}
    ),
    "LoopCheckpoint.restore": Row(
        lambda **k: loop_checkpoint().restore(**k), dict, {"step": INDEX[1:]}
    ),
    "diff": Row(
        ktd.diff, lambda: dict.fromkeys("ab", made_run("v5e:2x4")), {"a": MODEL, "b": MODEL}
    ),
    "convert": Row(ktd.convert, lambda: {"model": made()}, {"model": MODEL}),
    "assign": Row(
        ktd.assign,
        lambda: {"layer": keras.layers.Dense(1), "logical_device": 0},
        {"layer": LAYER, "logical_device": INDEX[1:]},
    ),
    "replicate": Row(ktd.replicate, dict, {"layer": LAYER}),
    "split": Row(
        ktd.split,
        lambda: {"layer": keras.layers.Dense(1)},
        {"layer": LAYER, "output": (3, True, NAN, [3])},
    ),
    "remat": Row(
        ktd.remat,
        lambda: {"layer": keras.layers.Dense(1)},
        {"layer": LAYER, "policy": word("ful", "dot")},
    ),
    "scan_blocks": Row(
        ktd.scan_blocks,
        lambda: {"model": made()},
        {"model": MODEL, "enabled": FLAG, "inputs": ANYTHING},
    ),
    "simulate": Row(ktd.simulate, dict, {"num_devices": COUNT}),
    "initialize": Row(
        ktd.initialize,
        lambda: {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0},
        {
            "coordinator": ("", "host", 3, True, []),
            "num_processes": COUNT_OR_NONE,
            "process_id": INDEX[1:],
            "timeout_s": SECONDS,
            "peer_timeout_s": SECONDS,
        },
    ),
    "InputShard": Row(
        ktd.InputShard,
        dict,
        {"index": INDEX, "count": COUNT, "processes": (None, 3, "0", [True], [-1])},
    ),
    "InputContext": Row(
        ktd.InputContext,
        dict,
        {"num_input_pipelines": COUNT, "input_pipeline_id": INDEX, "num_replicas_in_sync": COUNT},
    ),
    "InputContext.get_per_replica_batch_size": Row(
        lambda **k: ktd.InputContext().get_per_replica_batch_size(**k),
        dict,
        {"global_batch_size": COUNT},
    ),
    "ValueContext": Row(
        ktd.ValueContext, dict, {"replica_id_in_sync_group": INDEX, "num_replicas_in_sync": COUNT}
    ),
    "RunOptions": Row(
        ktd.RunOptions,
        dict,
        {
            "dynamic_batch": FLAG,
            "buckets": ("", "powr", 3, True, NAN, [], [0], [-1], [True], ["8"], [8.5], (8, 4)),
            "axis": ("", "1", True, 0.5, NAN),
            "check_padding": FLAG,
        },
    ),
    "LayoutRules": Row(
        ktd.LayoutRules, dict, {"rules": (None, 3, True, "ab", [3], [("(", ())], [("a", 3)])}
    ),
    "LayoutRules.match": Row(lambda **k: ktd.LayoutRules([]).match(**k), dict, {"path": TEXT}),
    "LayoutRules.matches": Row(lambda **k: ktd.LayoutRules([]).matches(**k), dict, {"path": TEXT}),
    "LayoutRules.from_json": Row(ktd.LayoutRules.from_json, dict, {"text": (*TEXT, "", "{}", "3")}),
    "LayoutRules.from_layout_map": Row(
        ktd.LayoutRules.from_layout_map, dict, {"layout_map": (None, 3, True, "x", [])}
    ),
    "Planner": Row(
        ktd.Planner,
        lambda: {"kind": "fsdp"},
        {
            "kind": (None, *word("fsdq")),
            "min_size": ("", "3", True, -1, NAN, []),
            "memory_bytes": COUNT_OR_NONE,
            "between_blocks": (None, *word("spilt")),
        },
    ),
    "Topology.parse": Row(
        ktd.Topology.parse,
        lambda: {"name": "v5e:4x4"},
        {
            "name": (None, *word("v5:4x4", "v5e:4x5")),
            "num_slices": COUNT_OR_NONE,
            "chips_per_host": COUNT_OR_NONE,
        },
    ),
    "Topology.attached": Row(
        ktd.Topology.attached, dict, {"devices": (3, True, "", "cpu", [3], [])}
    ),
    "Topology.stood_in_by": Row(
        lambda **k: ktd.Topology.parse("v5e:2x4").stood_in_by(**k),
        dict,
        {"devices": (None, 3, True, "12345678", [], [3] * 8)},
    ),
    "Topology.peak_flops": Row(
        lambda **k: ktd.Topology.parse("v5e:2x4").peak_flops(**k),
        dict,
        {"dtype": (None, 3, True, [])},
    ),
    "Topology.wraps": Row(
        lambda **k: ktd.Topology.parse("v5e:2x4").wraps(**k),
        dict,
        {"axis": (None, "x", True, 2, -1, NAN)},
    ),
    "Topology": Row(
        ktd.Topology,
        lambda: {"chip": ktd.Topology.parse("v5e:2x4").chip, "shape": (2, 4)},
        {
            **{"chip": (None, 3, "v5e"), "shape": (None, 3, "2x4", (), (0, 1), (2.5,), (True, 2))},
            **{"num_slices": COUNT, "given_chips_per_host": COUNT_OR_NONE, "_attached": "its own"},
        },
    ),
    "DeviceAssignment": Row(
        ktd.DeviceAssignment,
        lambda: {"topology": ktd.Topology.parse("v5e:2x4"), "order": ((0, 1), (2, 3))},
        {"topology": (None, 3, "v5e:2x4"), "order": (None, 3, "01", (), ((),)), "block": "its own"},
    ),
    "DeviceAssignment.build": Row(
        ktd.DeviceAssignment.build,
        lambda: {"topology": "v5e:2x4"},
        {
            "topology": ("", "v5:2x4", 3, True),
            "computation_shape": (3, True, "22", [0, 1], [-1], [1.5], [True], ["2"]),
            "num_replicas": COUNT_OR_NONE,
        },
    ),
    "DeviceAssignment.from_order": Row(
        ktd.DeviceAssignment.from_order,
        lambda: {"topology": "v5e:2x4", "order": [[0], [1]]},
        {
            "order": (None, 3, True, "01", [], [[]], [["0"]], [[NAN]]),
            "topology": ("", 3, True),
        },
    ),
    "TPUStrategy": Row(
        ktd.TPUStrategy,
        dict,
        {
            "mesh": (
                "",
                "data",
                3,
                True,
                NAN,
                [],
                {},
                {"data": 0},
                {"data": True},
                {"": 8},
                {8: 8},
                {"data": "8"},
            ),
            "layout": ("", "fsdq", 3, True, NAN, {"kernel": 3}),
            "devices": (3, True, "cpu:99", [], [3]),
            "topology": ("", "v5:4x4", 3, True, []),
            "data_axes": ("", "dta", 3, True, NAN),
            "batch_axis": ("", "0", True, 0.5, NAN, -1, (0, "x"), {"a": -2}),
            "prefetch": ("", "3", True, -1, 1.5, NAN, [], HUGE),
            "donate_state": ("", "atuo", 3, 0.5, NAN, [], None),
            "shard_optimizer": ("fsdq", *FLAG),
            "remat": (*word("ful")[:-2], {"dense": "ful"}, {3: "full"}),
            "input_timeout_s": SECONDS_OR_NONE,
            "input": (None, *word("globl", "per_proces")),
            "compiler_options": ("", "atuo", 3, True, NAN, [], {1: True}, {"xla_foo": None}),
            "tables": ("", "row", 3, True, NAN, []),
            "head": ("", "piece", 3, True, NAN, [], None),
            "compilation_cache": ("", 3, NAN, [], b"folder"),
        },
    ),
    "TPUStrategy.explain": Row(
        lambda **k: strategy().explain(**k),
        lambda: {"model": made()},
        {"model": MODEL, "path": ("", "dnse/kernel", 3, True, NAN, []), "passes": FLAG},
    ),
    "TPUStrategy.lint": Row(
        lambda **k: strategy().lint(**k),
        lambda: {"model": made()},
        {"model": MODEL, "batch_size": COUNT_OR_NONE, "strict": FLAG},
    ),
    "TPUStrategy.plan": Row(
        lambda **k: ktd.TPUStrategy(layout="fsdp").plan(**k), dict, {"model": MODEL}
    ),
    "TPUStrategy.placement": Row(lambda **k: strategy().placement(**k), dict, {"model": MODEL}),
    "TPUStrategy.show": Row(lambda **k: strategy().show(**k), dict, {"what": MODEL[1:]}),
    "TPUStrategy.get_variable_layout": Row(
        lambda **k: strategy().get_variable_layout(**k), dict, {"variable": MODEL}
    ),
    "TPUStrategy.get_tensor_layout": Row(
        lambda **k: strategy().get_tensor_layout(**k), dict, {"path": TEXT}
    ),
    "TPUStrategy.get_data_layout": Row(
        lambda **k: strategy().get_data_layout(**k), dict, {"data_shape": (None, 3, True, "x")}
    ),
    "Checkpoint": Row(
        ktd.callbacks.Checkpoint,
        lambda: {"directory": "/tmp/none"},
        {
            "directory": PATH,
            "only": word("trainde"),
            "base": PATH[1:],
            "every_steps": COUNT_OR_NONE,
            "every_minutes": SECONDS_OR_NONE,
            "every_epochs": COUNT_OR_NONE,
            "keep": COUNT_OR_NONE,
            "monitor": ("", 3, True, NAN, []),
            "mode": (None, *word("mn", "maximum")),
            "asynchronous": FLAG,
            "resume": FLAG,
            "overwrite": FLAG,
            "grace_s": SECONDS,
            "keep_every_hours": SECONDS_OR_NONE,
        },
    ),
    "StopAtStep": Row(ktd.callbacks.StopAtStep, lambda: {"n": 3}, {"n": COUNT[:-1], "more": FLAG}),
    "NameNaN": Row(ktd.callbacks.NameNaN, dict, {"stop": FLAG}),
    "Rates": Row(ktd.callbacks.Rates, dict, {"expected": ("", 3, True, NAN, [], {}, "v5e")}),
    "Rates.load_state_dict": Row(
        lambda **k: ktd.callbacks.Rates().load_state_dict(**k),
        dict,
        {"state": (None, "", 3, True, NAN, [])},
    ),
    "Profile": Row(
        ktd.callbacks.Profile,
        dict,
        {
            "steps": (None, "", 3, True, NAN, [], {}, (1,), (0, 2), (3, 2), (1.0, 2), (1, 2, 3)),
            "directory": PATH,
        },
    ),
    "HostMetrics": Row(
        ktd.callbacks.HostMetrics,
        lambda: {"metrics": {"f1": lambda y, p: 0.0}},
        {
            "metrics": (None, "", 3, True, [], {}, {"f1": 3}, {3: np.mean}),
            "validation_data": ANYTHING,
            "batch_size": COUNT_OR_NONE,
            "steps": COUNT_OR_NONE,
            "prefix": TEXT,
        },
    ),
    "HostMetrics.compute": Row(
        lambda **k: ktd.callbacks.HostMetrics(
            {"f1": np.mean}, (np.ones((2, 4)), np.ones(2))
        ).compute(**k),
        dict,
        {"model": MODEL},
    ),
    "RunOptions.bucket": Row(
        lambda **k: ktd.RunOptions(buckets=(8,)).bucket(**k), dict, {"length": COUNT}
    ),
    "RunOptions.axes": Row(ktd.RunOptions, dict, {"args": ITS_OWN, "ranks": ITS_OWN}),
    "Planner.check_mesh": Row(ktd.Planner, dict, {"mesh": ITS_OWN, "data_axes": ITS_OWN}),
    "Planner.plan": Row(
        lambda **k: ktd.Planner("fsdp").plan(**k),
        lambda: {"mesh": strategy().mesh, "data_axes": ("data",)},
        {"model": MODEL, "mesh": ITS_OWN, "data_axes": ITS_OWN},
    ),
    **{
        f"DeviceAssignment.{name}": Row(
            lambda name=name, **k: getattr(assignment(), name)(**k),
            lambda: {"replica": 0, "logical_core": 0},
            dict.fromkeys(("replica", "logical_core"), INDEX),
        )
        for name in ("coordinates", "tpu_device")
    },
    "TPUStrategy.run": Row(
        lambda **k: strategy().run(**k),
        lambda: {"fn": lambda *a: None},
        {**OF_RUNS, "outputs": word("lats", "first")},
    ),
    "TPUStrategy.verify_run": Row(
        lambda **k: strategy().verify_run(**k),
        lambda: {"fn": lambda *a: None, "topology": "v5e:2x4"},
        {
            **OF_RUNS,
            "topology": (None, *word("v5:4x4", "v5e:2x2")),
            "as_on_chip": FLAG,
            "timeout": SECONDS,
        },
    ),
    "TPUStrategy.loop": Row(
        loop_over_ones,
        lambda: {"fn": lambda *a: None},
        {
            "fn": (None, "", "f", 3, True, []),
            "dataset": (None, "", 3, True, [], np.ones(8)),
            "steps_per_launch": COUNT,
            "args": (3, True, "x", NAN),
            "options": (3, True, "x", {}, []),
            "outputs": word("lats", "first"),
        },
    ),
    "TPUStrategy.local_results": Row(strategy, dict, {"value": ANYTHING}),
    "TPUStrategy.reduce": Row(
        reduce_ones,
        lambda: {"reduce_op": "sum", "axis": None},
        {
            "reduce_op": (None, *word("smu", "average")),
            "value": ANYTHING,
            "axis": ("", "0", True, 0.5, NAN, 7),
        },
    ),
    "TPUStrategy.gather": Row(
        lambda **k: strategy().gather(**k),
        lambda: {"value": np.ones(3), "axis": 0},
        {"value": ANYTHING, "axis": (None, "", "0", True, 0.5, NAN, [])},
    ),
    "TPUStrategy.distribute_dataset": Row(
        lambda **k: strategy().distribute_dataset(**k),
        lambda: {"dataset": [np.ones(8)]},
        {"dataset": (None, 3, True, NAN), "options": (3, "x", True), "batch_size": COUNT_OR_NONE},
    ),
    "TPUStrategy.distribute_datasets_from_function": Row(
        lambda **k: strategy().distribute_datasets_from_function(**k),
        dict,
        {"dataset_fn": (None, "", 3, True, [])},
    ),
    "TPUStrategy.distribute_values_from_function": Row(
        lambda **k: strategy().distribute_values_from_function(**k),
        dict,
        {"value_fn": (None, "", 3, True, [])},
    ),
    "TPUStrategy.split_to_logical_devices": Row(
        lambda **k: ktd.TPUStrategy(assignment()).split_to_logical_devices(**k),
        lambda: {"tensor": np.ones((4, 4)), "partition_dimensions": [1, 2]},
        {
            "tensor": ANYTHING,
            "partition_dimensions": (None, 3, True, "12", [1], [1, 0], [1, 1.5], [1, True], [1, 3]),
            "batch_axis": ("", "0", True, 0.5, NAN, []),
        },
    ),
    "TPUStrategy.replicate_to_logical_devices": Row(
        lambda **k: ktd.TPUStrategy(assignment()).replicate_to_logical_devices(**k),
        lambda: {"tensor": np.ones((4, 4))},
        {"tensor": ANYTHING, "batch_axis": ("", "0", True, 0.5, NAN, [])},
    ),
    "TPUStrategy.assign_to_logical_device": Row(
        lambda **k: ktd.TPUStrategy(assignment()).assign_to_logical_device(**k),
        lambda: {"target": keras.layers.Dense(1), "logical_device_id": 0},
        {"target": (None, "", 3, True, []), "logical_device_id": INDEX},
    ),
    "TPUStrategy.logical_device": Row(
        lambda **k: ktd.TPUStrategy(assignment()).logical_device(**k).__enter__(),
        dict,
        {"logical_device_id": INDEX},
    ),
    "dry_run": Row(
        ktd.dry_run,
        lambda: {"build": made, "strategy": described(), "batch_size": 8},
        {
            "strategy": STRATEGY,
            "effort": word("quik"),
            "verify": FLAG,
            **OF_DRY_RUNS,
        },
    ),
    "verify": Row(
        ktd.verify,
        lambda: {"build": made, "strategy": described(), "batch_size": 8},
        {
            "strategy": STRATEGY,
            "steps": (0, -1, 2.5, "2", True, NAN, []),
            "as_on_chip": FLAG,
            **{n: values for n, values in OF_DRY_RUNS.items() if n not in ("progress", "rows")},
            "batch_size": COUNT,
        },
    ),
    "TPUStrategy.check": Row(
        lambda **k: strategy().check(**{"minutes": 1e-6, **k}),
        dict,
        {
            **{"model": MODEL[1:], "minutes": SECONDS, "batch_size": COUNT_OR_NONE},
            "sequence_length": COUNT_OR_NONE,
            **dict.fromkeys(("x", "y", "sample_weight"), "any structure of arrays"),
        },
    ),
    "TPUStrategy.dry_run": Row(
        lambda **k: described().dry_run(**k),
        lambda: {"model": made, "batch_size": 8},
        {
            **{"model": BUILD, "topology": ("", "v5:4x4", 3, True, []), "effort": word("quik")},
            "mesh": ("", "data", 3, True, [], {"data": 3}),
            **{name: values for name, values in OF_DRY_RUNS.items() if name != "build"},
            "verify": FLAG,
        },
    ),
    "loss_and_gradients": Row(
        ktd.loss_and_gradients,
        lambda: {"function": lambda: 1.0, "models": made()},
        {"function": (None, "f", 3, True, []), "models": (None, "", "model", 3, [], {}, [3])},
    ),
    "search": Row(
        ktd.search,
        lambda: {"build": made, "topology": "v5e:2x2", "batch_size": 8},
        {
            "build": BUILD,
            "topology": (None, *word("v5:4x4"), [3], ["v5e-8", "v5:4x4"], ["v5e-8", "v5e:2x4"]),
            "batch_size": COUNT_OR_NONE,
            "price_per_chip_hour": (
                *("", "1.2", 1.2, True, 0, NAN, [], {}, {"v5e": 0}, {"v5e": NAN}, {"v5e": True}),
                *({"v5f": 1.0}, {"v6e": 1.0}),
            ),
            **dict.fromkeys(("x", "y", "sample_weight"), ANYTHING),
            "sequence_length": COUNT_OR_NONE,
            **{"compilations": COUNT_OR_NONE, "exact": INDEX, "budget_s": SECONDS},
            **{
                "among": (
                    3,
                    True,
                    "x",
                    [],
                    {},
                    [3],
                    [{}],
                    [{"mesh": 3}],
                    [{"mesh": {"data": 4}, "plan": 1}],
                ),
                "progress": (3, True, "x"),
                "cache": (None, "", 3, []),
            },
        },
    ),
    "Bidirectional": Row(
        ktd.layers.Bidirectional,
        lambda: {"layer": ktd.layers.LSTM(2)},
        {"layer": "as in Keras", "merge_mode": "as in Keras", "weights": "as in Keras"}
        | {"backward_layer": "as in Keras"},
    ),
    "TimeDistributed": Row(ktd.layers.TimeDistributed, dict, {"layer": "as in Keras"}),
    **{
        name: Row(
            lambda kind=name, **k: getattr(ktd.layers, kind)(2, **k),
            dict,
            {"segment": COUNT_OR_NONE},
        )
        for name in ("LSTM", "GRU", "SimpleRNN")
    },
}


def odd_calls() -> Iterator[tuple[str, str, Any]]:
    """Every callable, parameter and value that it refuses."""
    for name, row in ROWS.items():
        for parameter, values in row.wrong.items():
            for value in () if isinstance(values, str) else values:
                yield name, parameter, value


def arguments(name: str, parameter: str, value: Any) -> dict[str, Any]:
    return {**ROWS[name].right(), parameter: value}
