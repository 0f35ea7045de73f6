"""Trains ordinary Keras 3 models on one TPU, eight, or a pod, with the numbers of one device."""

import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING

from keras_tpu_dist.common import tensorflow_names as _tensorflow_names
from keras_tpu_dist.common.errors import did_you_mean as _did_you_mean
from keras_tpu_dist.common.version import __version__ as __version__


def _as_shell() -> bool:
    """Whether this process runs the command `ktd`, or `python -m keras_tpu_dist`."""
    program = _os.path.basename(_sys.argv[0]) if getattr(_sys, "argv", None) else ""
    if program == "-m":  # Python is still looking for the module
        return "keras_tpu_dist" in _sys.orig_argv
    return program in ("ktd", "ktd.exe")


# `ktd --help` must not wait for Keras and JAX. In the shell's own process, the imports below are
# postponed until `_load` runs this file again; in any other process they run at once.
_waiting = "_waiting" not in globals() and _as_shell()

if TYPE_CHECKING or not _waiting:
    from keras_tpu_dist import _keras as _keras  # first: selects and checks Keras's JAX backend
    from keras_tpu_dist import layers as layers
    from keras_tpu_dist.hardware.assignment import DeviceAssignment as DeviceAssignment
    from keras_tpu_dist.hardware.simulation import simulate as simulate
    from keras_tpu_dist.hardware.topology import Topology as Topology
    from keras_tpu_dist.hardware.versions import warn_of_wrong_jax as _warn_of_wrong_jax
    from keras_tpu_dist.input.shards import InputShard as InputShard
    from keras_tpu_dist.layers import convert as convert
    from keras_tpu_dist.layout.annotations import replicate as replicate
    from keras_tpu_dist.layout.annotations import split as split
    from keras_tpu_dist.layout.planner import Planner as Planner
    from keras_tpu_dist.layout.rules import LayoutRules as LayoutRules
    from keras_tpu_dist.logical.assign import assign as assign
    from keras_tpu_dist.memory.remat import remat as remat
    from keras_tpu_dist.memory.scan_blocks import scan_blocks as scan_blocks
    from keras_tpu_dist.processes import initialize as initialize
    from keras_tpu_dist.replica import DistributedDataset as DistributedDataset
    from keras_tpu_dist.replica import InputContext as InputContext
    from keras_tpu_dist.replica import PerReplica as PerReplica
    from keras_tpu_dist.replica import ReplicaContext as ReplicaContext
    from keras_tpu_dist.replica import RunOptions as RunOptions
    from keras_tpu_dist.replica import ValueContext as ValueContext
    from keras_tpu_dist.replica import get_replica_context as get_replica_context
    from keras_tpu_dist.replica import loss_and_gradients as loss_and_gradients
    from keras_tpu_dist.show.progress import show_progress as show_progress
    from keras_tpu_dist.strategy import TPUStrategy as TPUStrategy
    from keras_tpu_dist.training.membership import find_strategy as _find_strategy

    _keras.serve_loading(_find_strategy)
    _warn_of_wrong_jax()

if TYPE_CHECKING:
    from keras_tpu_dist import callbacks as callbacks
    from keras_tpu_dist.checkpoint import CheckpointError as CheckpointError
    from keras_tpu_dist.checkpoint import LoopCheckpoint as LoopCheckpoint
    from keras_tpu_dist.checkpoint import checkpoints as checkpoints
    from keras_tpu_dist.checkpoint import restore as restore
    from keras_tpu_dist.layers.freezing import freeze as freeze
    from keras_tpu_dist.tools.dryrun.diff import diff as diff
    from keras_tpu_dist.tools.dryrun.run import DryRun as DryRun
    from keras_tpu_dist.tools.dryrun.run import dry_run as dry_run
    from keras_tpu_dist.tools.replay import Verification as Verification
    from keras_tpu_dist.tools.replay import verify as verify
    from keras_tpu_dist.tools.searches.search import search as search

__all__ = [
    "CheckpointError",
    "DeviceAssignment",
    "DistributedDataset",
    "DryRun",
    "InputContext",
    "InputShard",
    "LayoutRules",
    "LoopCheckpoint",
    "PerReplica",
    "Planner",
    "ReplicaContext",
    "RunOptions",
    "TPUStrategy",
    "Topology",
    "ValueContext",
    "Verification",
    "__version__",
    "assign",
    "callbacks",
    "checkpoints",
    "convert",
    "diff",
    "dry_run",
    "freeze",
    "get_replica_context",
    "initialize",
    "layers",
    "loss_and_gradients",
    "remat",
    "replicate",
    "restore",
    "scan_blocks",
    "search",
    "show_progress",
    "simulate",
    "split",
    "verify",
]

# Names that an ordinary fit does not need, and their modules, which are imported on first use.
# Layers are imported at once, because Keras only finds a layer named in a file if its class is
# registered.
_LATER = {
    "callbacks": "callbacks",
    "CheckpointError": "checkpoint",
    "LoopCheckpoint": "checkpoint",
    "checkpoints": "checkpoint",
    "restore": "checkpoint",
    "diff": "tools.dryrun.diff",
    "DryRun": "tools.dryrun.run",
    "dry_run": "tools.dryrun.run",
    "freeze": "layers.freezing",
    "search": "tools.searches.search",
    "Verification": "tools.replay",
    "verify": "tools.replay",
}


def _load():
    """Runs the postponed imports, in the shell's process."""
    if _waiting:
        _importlib.reload(_sys.modules[__name__])


if not TYPE_CHECKING:  # a type checker would accept any name of a module with `__getattr__`

    def __getattr__(name):
        if _waiting and not name.startswith("_"):
            _load()
            return getattr(_sys.modules[__name__], name)
        instead = _tensorflow_names.of_attribute(__name__, name)
        if instead is not None:
            return _tensorflow_names.absent(f"{__name__}.{name}", instead)
        if name not in _LATER:
            near = _did_you_mean(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")
        module = _importlib.import_module(f"{__name__}.{_LATER[name]}")
        globals()[name] = module if name == _LATER[name] else getattr(module, name)
        return globals()[name]

    def __dir__():
        return __all__
