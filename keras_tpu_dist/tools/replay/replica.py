"""Verify replica code: the TPU compiler's program for `strategy.run`, beside the CPU's program."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core
import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.tools.checkup.bounds import State, allowed
from keras_tpu_dist.tools.dryrun.build import (
    ToCompile,
    export_step,
    kernels_of,
    of_platform,
    pickled,
    whole_rows_of,
)
from keras_tpu_dist.tools.replay.report import Verification
from keras_tpu_dist.tools.replay.run import (
    Expected,
    TPUProgram,
    check_options,
    ragged_products_as_products,
)

# A `TPUStrategy`, whose module imports this one.
_Strategy = Any


def verify_run(
    strategy: _Strategy,
    fn: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Any,
    steps: int,
    topology: str | Topology,
    as_on_chip: bool,
    timeout: float,
) -> Verification:
    """See `TPUStrategy.verify_run`."""
    started = time.perf_counter()
    slice_ = Topology.parse(topology)
    _check(strategy, slice_)
    check_options("verify_run", as_on_chip, timeout)
    name = getattr(fn, "__name__", type(fn).__name__)
    with stages(f"verify, {name}", 4) as begin:
        begin("tracing")
        # The compiler has kernels of its own for ragged products, whose code cannot be run here.
        with ragged_products_as_products():
            program, call, steps = strategy.replica_code.run(
                strategy, fn, args, kwargs, options, steps, "last", _as_it_is
            )
            run, arguments = program.with_arguments(call, steps)
            lowered, kernels = lowered_run(strategy, slice_, run, arguments)
        begin("running on simulated devices")
        # Variables of a mixed policy are float32: the program tells what it computes in.
        half = as_on_chip or "f16[" in str(run.trace(*arguments).jaxpr)
        expected = _expected(run, arguments, program, steps, half)
        if as_on_chip:
            # As in `verify`: an optimizer may amplify what rounding does to its variables.
            limits = [
                limit if name.startswith("result") else math.inf
                for name, limit in zip(expected.names, expected.allowed, strict=True)
            ]
            expected = replace(expected, allowed=limits)
        begin("compiling for the TPU")
        compiled = TPUProgram(lowered, expected, kernels, timeout, as_on_chip)
        begin("running the TPU's program")
        return compiled.verification(
            started,
            mode="run",
            model=name,
            batch_size=sum(call.rows or ()),
            steps=steps,
            launches=1,
        )


def _as_it_is(program: Any, call: Any, steps: int, every: bool) -> tuple[Any, Any, int]:
    return program, call, steps


def _check(strategy: _Strategy, topology: Topology) -> None:
    devices = strategy.mesh.devices
    simulated = strategy.topology is None and devices.flat[0].platform == "cpu"
    if simulated and jax.process_count() == 1 and devices.size == topology.num_devices:
        return
    received = {
        "topology": f"{topology.name}, {topology.num_devices} devices",
        "strategy": repr(strategy),
        "processes": jax.process_count(),
    }
    raise value_error(
        "verify_run needs as many simulated devices as the slice has, in one process.",
        received=received,
        fix=f"ktd.simulate({topology.num_devices}) first, TPUStrategy(...) without topology, and "
        f'topology="{topology.name}" here.',
    )


def lowered_run(
    strategy: _Strategy, topology: Topology, run: Any, arguments: tuple
) -> tuple[ToCompile, tuple[Any, ...]]:
    """A launch of `run`, ready for the compiler, and its hand-written kernels."""
    there = strategy.on_topology(topology, dict(strategy.mesh.shape))

    def step() -> Callable:
        # The program within the `jax.jit`: that may have the user's options for the compiler.
        traced = jax.extend.core.jaxpr_as_fun(run.program(*arguments).trace(*arguments).jaxpr)
        return lambda *given: traced(*jax.tree.leaves(given))

    # A structure of ours is no part of a file.
    leaves = jax.tree.leaves(arguments[0]), jax.tree.leaves(arguments[1])
    exported = export_step(step(), *leaves, "tpu")
    given = of_platform(there, "tpu")
    given["compiler_options"] = there.runner.replica_options
    lowered = ToCompile(
        program=pickled(exported),
        donate=False,
        axes=tuple(there.mesh.shape.items()),
        devices=tuple(there.mesh.devices.flat),
        whole=whole_rows_of(step, leaves, "tpu", exported),
        **given,
    )
    return lowered, kernels_of(run.program(*arguments), arguments, exported)


def _expected(run: Any, arguments: tuple, program: Any, steps: int, half: bool) -> Expected:
    """What the program on simulated devices returns, and how far rounding may move it."""
    leaves, structure = jax.tree.flatten(arguments)
    state: State = [[np.array(leaf) for leaf in leaves]]

    def computed(state: State, batches: list[Any]) -> list[np.ndarray]:
        given = [
            # A launch overwrites what it consumes.
            jax.device_put(value, leaf.sharding, may_alias=False)
            if isinstance(leaf, jax.Array)
            else value
            for value, leaf in zip(state[0], leaves, strict=True)
        ]
        outputs = run(*jax.tree.unflatten(structure, given))
        return [np.asarray(value) for value in jax.tree.leaves(outputs)]

    results = computed(state, [])
    before = program.numbers_before(arguments)
    limits = allowed(computed, state, [], results, "cpu", half, before=before, steps=steps)
    return Expected([state[0]], {}, jax.tree.leaves(program.names), results, limits)
