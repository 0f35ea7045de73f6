"""Programs of this package through libtpu: compiled for a slice, run on simulated devices.

`instead_of_cpu` replaces what `Jitted` launches. Everything that a strategy compiles goes through
it: operations, steps of `fit`, launches of several steps, replica code.
"""

import functools
import os

import jax
import numpy as np

from keras_tpu_dist._keras.replicas import whole_text
from keras_tpu_dist.hardware.compiler_options import options_for
from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import CHIPS, Topology
from keras_tpu_dist.hardware.versions import DISABLED_PASSES
from keras_tpu_dist.programs.partitioner import Jitted, exchanges
from keras_tpu_dist.programs.partitioner.branches import choosing_axes
from keras_tpu_dist.tools.checkup.bounds import largest
from keras_tpu_dist.tools.dryrun.worker import parts
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay.execute import Simulated
from keras_tpu_dist.tools.replay.rewrite import runnable
from keras_tpu_dist.tools.replay.run import ROUNDING_PASSES

CHIP = os.environ.get("KTD_CHIP", "v5e")
_ALLOWED = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]


class CopiesDiffer(AssertionError):
    """Devices that should have the same values have others."""


class Replayed:
    """A compiled function that runs libtpu's program."""

    def __init__(self, owner, args, mesh):
        self._owner, self._program, self._mesh = owner, owner.program(*args), mesh
        self._compiled = {}

    def __call__(self, *args):
        leaves = jax.tree.leaves(args)
        key = tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        if key not in self._compiled:
            self._compiled[key] = self._made(args)
        return self._compiled[key](leaves)

    def _made(self, args):
        export = functools.partial(jax.export.export, platforms=["tpu"], disabled_checks=_ALLOWED)
        laid = export(self._program)(*args).out_shardings_jax(self._mesh)
        # Within another program, as a dry run exports it: on its own, Shardy's import aborts for
        # some programs with "funcResultSharding.getNumOperands() == 1 (2 vs. 1)".
        exported = export(jax.jit(lambda *args: self._program(*args)))(*args)
        there = _described(tuple(self._mesh.shape.items()))
        whole = jax.sharding.NamedSharding(there, jax.sharding.PartitionSpec())
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s or whole)
            for a, s in zip(exported.in_avals, exported.in_shardings_jax(there), strict=True)
        ]
        given, named = jax.tree.unflatten(exported.in_tree, shapes)
        options = options_for("auto", there.devices.flat[0], there.size) or {}
        passes = [*ROUNDING_PASSES, *filter(None, [options.get(DISABLED_PASSES)])]
        options = {**options, DISABLED_PASSES: ",".join(passes)}
        lowered = jax.jit(exported.call, keep_unused=True).lower(*given, **named)
        compiled = lowered.compile(compiler_options=options)
        text, taken = whole_text(compiled), choosing_axes(self._program.trace(*args).jaxpr)
        if exchanges.exchanged_in_branches(text, dict(there.shape), taken):
            # As `Jitted` itself does with what its compiler made.
            assert not exchanges.rows_are_whole(), "rows are exchanged in a branch"
            with exchanges.whole_rows():
                return Replayed(self._owner, args, self._mesh)._made(args)
        text = runnable(parse(text), range(there.size))
        program = Simulated(text, parts(compiled, exported, list(there.devices.flat)))
        return functools.partial(self._run, program, exported, laid)

    def _run(self, program, exported, laid, leaves):
        given = [
            np.asarray(leaf, dtype=aval.dtype)
            for leaf, aval in zip(leaves, exported.in_avals, strict=True)
        ]
        arrays = []
        for (value, apart), sharding in zip(
            program.whole(program.launch(given)), laid, strict=True
        ):
            if apart > 1e-5 * (1 + largest(value)):
                raise CopiesDiffer(f"copies differ by {apart:.0e}")
            own = sharding or jax.sharding.NamedSharding(self._mesh, jax.P())
            arrays.append(jax.device_put(value, own))
        return jax.tree.unflatten(exported.out_tree, arrays)


@functools.cache
def _described(axes):
    """The mesh of a slice of as many chips."""
    sizes = [size for _, size in axes]
    chip = CHIPS[CHIP]  # names of slices count the cores of chips with one device
    slice_ = Topology.parse(f"{CHIP}-{int(np.prod(sizes)) * chip.cores // chip.devices}")
    from jax.experimental import topologies

    described = topologies.get_topology_desc(**slice_.libtpu_arguments()).devices
    return jax.sharding.Mesh(
        np.array(described).reshape(sizes),
        [name for name, _ in axes],
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )


def instead_of_cpu():
    """From now on, what a strategy launches on several devices is libtpu's program."""
    os.environ.update({k: v for k, v in libtpu_environment().items() if k != "JAX_PLATFORMS"})
    launched = Jitted._equal_or_own

    def replayed(self, kind, args):
        if self._mesh.size == 1 or jax.process_count() > 1:
            return launched(self, kind, args)
        return Replayed(self, args, self._mesh)

    Jitted._equal_or_own = replayed
