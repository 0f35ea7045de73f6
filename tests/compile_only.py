"""Programs for slices that nobody has."""

import pickle

import jax.export

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.hardware.compiler_options import options_for
from keras_tpu_dist.replica.call import prepare
from keras_tpu_dist.tools.dryrun import build as dryrun
from keras_tpu_dist.tools.dryrun.build import Lowered, Subject
from keras_tpu_dist.tools.dryrun.compile import compile_lowered
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.dryrun.state_bytes import StateBytes


def lower(build, strategy, *, batch_size, mode="train", platform="tpu", **inputs):
    """The lowered step of a model, as a dry run makes it."""
    step = Subject(build, strategy, batch_size, Inputs(**inputs), mode)
    return dryrun.lower(step, platform)


def compiled_for_tpu(strategy, function, args, topology):
    """The program that `strategy.run` made on simulated devices, compiled for a slice."""
    call = prepare(args, {}, ktd.RunOptions(), strategy)
    program = strategy.replica_code._programs_of(function)[call.key][-1]
    run, arguments = program.with_arguments(call)
    exported = jax.export.export(run, platforms=["tpu"])(*arguments)
    slice_ = ktd.Topology.parse(topology)
    # A dry run's lowered step, of which the compiling process wants no size.
    lowered = Lowered(
        mode="train",
        program=pickle.dumps(_keras.without_vjp(exported)),
        donate=False,
        axes=tuple(strategy.mesh.shape.items()),
        devices=(),
        topology=slice_,
        platform="tpu",
        state=StateBytes(weights=0, optimizer=0, metrics=0, inputs=0),
        parameters=0,
        rows=0,
        tokens=0,
        layer_names=frozenset(),
        overstated=False,
        steps=1,
        ready_bytes=0,
        seconds=0.0,
        compiler_options=options_for("auto", slice_.devices()[0], slice_.num_devices),
    )
    return compile_lowered(lowered, effort="quick", timeout=300, topology=slice_)
