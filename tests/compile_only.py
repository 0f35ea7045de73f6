"""Programs for slices that nobody has."""

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun import build as dryrun
from keras_tpu_dist.tools.dryrun.build import Subject
from keras_tpu_dist.tools.dryrun.compile import compile_lowered
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.replay.replica import lowered_run


def lower(build, strategy, *, batch_size, mode="train", platform="tpu", **inputs):
    """The lowered step of a model, as a dry run makes it."""
    step = Subject(build, strategy, batch_size, Inputs(**inputs), mode)
    return dryrun.lower(step, platform)


def compiled_for_tpu(strategy, function, args, topology):
    """The program that `strategy.run` made on simulated devices, compiled for a slice."""
    program, call, _ = strategy.replica_code.run(
        strategy, function, args, {}, None, 1, "last", lambda program, call, *_: (program, call, 1)
    )
    run, arguments = program.with_arguments(call)
    lowered, _ = lowered_run(strategy, ktd.Topology.parse(topology), run, arguments)
    return compile_lowered(lowered, effort="quick", timeout=300)
