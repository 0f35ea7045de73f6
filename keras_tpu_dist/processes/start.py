"""Starts JAX as one of several processes, each with the devices of its host."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import Seconds, checked_arguments, is_count
from keras_tpu_dist.common.errors import message, runtime_error, value_error
from keras_tpu_dist.common.launched import (
    COORDINATOR,
    EXIT_UNAVAILABLE,
    LAUNCHER,
    NUM_PROCESSES,
    PROCESS_ID,
    begin_reports,
)
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.processes import watch
from keras_tpu_dist.processes.channel import Channel, is_open, opened, opened_by
from keras_tpu_dist.processes.saving import print_in_one_process

logger = logging.getLogger("keras_tpu_dist")

# Whether `initialize()` was called without arguments and found no cluster: one process.
_alone = False

# Seconds of silence after which a process counts as dead.
PEER_TIMEOUT_S = 30.0
_NO_COORDINATOR = (
    "JAX has several processes but no coordinator. They cannot compare anything, and if one fails, "
    "the others wait for ever: call ktd.initialize() first in the program"
)
# JAX's own heartbeats end a process without a reason, so they come later than ours.
_LATER_S = 10
_POLL_LAUNCHER_S = 0.5
# A coordinator at one of these addresses serves this host alone.
_LOOPBACK = ("localhost", "::1", "[::1]")
_ARGUMENTS = ("coordinator", "num_processes", "process_id")
_NOTHING = (None, None, None)
# Where JAX reads all three of them, if none is given: the variables that it needs, the first of
# which says that there is such a job; the one with the number of processes; what starts them.
_CLUSTERS = {
    "Open MPI": (("OMPI_MCA_orte_hnp_uri",), "OMPI_COMM_WORLD_SIZE", "mpirun python train.py"),
    "SLURM": (
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
        "SLURM_NTASKS",
        "srun python train.py",
    ),
}
_CALL = 'ktd.initialize("10.0.0.1:8476", num_processes=4, process_id=0)'
_FIX = f"Write {_CALL}."


@checked_arguments
def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: Seconds = 300.0,
    peer_timeout_s: Seconds = PEER_TIMEOUT_S,
) -> None:
    """Joins this process to the others that train together, each on the devices of its host.

    Call it first in the program, the same line in every process. On TPU VMs, GKE, SLURM and Open
    MPI, and under `python -m keras_tpu_dist launch`, you need no argument. Without arguments and
    without a cluster, the program runs as one process, with a warning. A second call with the same
    arguments does nothing. If something else has already called `jax.distributed.initialize` (a
    SLURM or Ray wrapper, `keras.distribution.initialize`), this call only starts to watch the other
    processes. If you do not call it then, the first strategy over several processes starts the
    watch.

    Args:
        coordinator: The address of process 0, `"10.0.0.1:8476"`.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.
        timeout_s: The seconds to wait until all processes have joined. After that the process ends
            with exit code 69.
        peer_timeout_s: The seconds of silence after which a process counts as dead, and all others
            end.

    Raises:
        ValueError: If only some of the first three are known, or one is malformed.
        RuntimeError: If JAX has already started, or was initialized as another process.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.initialize()  # doctest: +SKIP
    >>> ktd.TPUStrategy().num_hosts  # doctest: +SKIP
    16
    """
    end_with_launcher()
    begin_reports()
    given = _given(coordinator, num_processes, process_id)
    _check(*given)
    if jax.distributed.is_initialized():
        _check_same(given)
        watch_peers(peer_timeout_s)
        return
    if given == _NOTHING and (_alone or _is_only_host()):
        return
    if _keras.jax_backend_started():
        raise runtime_error(
            "initialize() must run before JAX starts.",
            received=f"a call after JAX started on {len(jax.local_devices())} device(s).",
            fix="Call ktd.initialize() right after the imports.",
        )
    with _deadline(timeout_s, given):
        try:
            jax.distributed.initialize(
                *given,
                cluster_detection_method=None if None in given else "deactivate",
                coordinator_bind_address=_bind_address(given[0]),
                initialization_timeout=int(timeout_s) + 60,
                heartbeat_timeout_seconds=int(2 * peer_timeout_s) + _LATER_S,
                shutdown_timeout_seconds=int(2 * peer_timeout_s) + _LATER_S,
            )
        except ValueError as error:
            _no_cluster(given, error)
            return
        except OSError as error:
            raise runtime_error(
                "On a TPU VM, JAX asks the metadata server which hosts train together.",
                received=f"no answer: {error}",
                fix="If this host trains alone, leave ktd.initialize() out. Otherwise write "
                f"{_CALL}.",
            ) from error
    watch_peers(peer_timeout_s, together=True)


def watch_peers(peer_timeout_s: float | None = None, *, together: bool = False) -> None:
    """Opens the host channel and starts the watch, unless they run already.

    `initialize` and the first strategy over several processes call it. So a process that fails ends
    the others, even if something else started JAX's distributed runtime.

    Args:
        peer_timeout_s: See `initialize`; `None` for its default.
        together: Whether all processes call it at the same time. If so, a silent process is dead,
            not late.
    """
    if is_open():
        return
    if _keras.coordination_client() is None:
        if jax.process_count() > 1:
            log_once(_NO_COORDINATOR, logging.WARNING)
        return
    _, num_processes, process_id = _keras.started_as()
    if num_processes == 1:
        return
    logger.info("process %d of %d", process_id, num_processes)
    channel = Channel(_keras.coordination_client(), process_id, num_processes)
    silent_s = PEER_TIMEOUT_S if peer_timeout_s is None else peer_timeout_s
    watching = watch.start(channel, process_id, num_processes, silent_s, together=together)
    channel.why_not = watching.why_not
    opened(channel)
    print_in_one_process(process_id)


opened_by(watch_peers)


def _is_only_host() -> bool:
    """Whether the variables of TPUs name this host alone, as those of Kaggle do.

    JAX would ask a metadata server for other slices, which Kaggle does not reach.
    """
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES"))
    slices = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    return bool(hosts) and "," not in hosts and slices == "1" and _cluster() is None


def _cluster() -> str | None:
    """The scheduler in whose job this process is, by the variables that it sets."""
    return next((name for name, ((mark, *_), *_) in _CLUSTERS.items() if mark in os.environ), None)


def _no_cluster(given: tuple, error: ValueError) -> None:
    """JAX found no cluster: one process if nothing was given, an error if only a part was."""
    global _alone
    hint, cluster = "", _cluster()
    if given == _NOTHING and cluster is not None:
        needed, count, start = _CLUSTERS[cluster]
        missing = [name for name in needed if name not in os.environ]
        variables = {name: os.environ[name] for name in (*needed, count) if name in os.environ}
        if not missing:
            raise value_error(
                f"The variables of {cluster} say which of how many processes this one is.",
                received=f"{variables}, of which JAX says: {error}.",
                fix=f"Start the program with `{start}`, and set none of them yourself.",
            ) from error
        if os.environ.get(count, "1") != "1":
            hint = (
                f". This is a {cluster} job of {os.environ[count]} tasks, without "
                f"{', '.join(missing)}: to run in all of them, start with `{start}`"
            )
    if given != _NOTHING:
        raise value_error(
            "Outside of a cluster that JAX knows (TPU VM, GKE, SLURM, Open MPI), give all of "
            "coordinator, num_processes and process_id, or none.",
            received=dict(zip(_ARGUMENTS, given, strict=True)),
            fix=_FIX,
        ) from error
    _alone = True
    log_once(
        "ktd.initialize() found no cluster (TPU VM, GKE, SLURM, Open MPI) and got no "
        f"coordinator: this program runs as one process{hint}",
        logging.WARNING,
    )


@contextlib.contextmanager
def _deadline(timeout_s: float, given: tuple) -> Iterator[None]:
    """Ends the process if others do not join: JAX would abort it without a reason."""

    def end() -> None:
        logger.critical("%s", _not_all_came(given, timeout_s))
        os._exit(EXIT_UNAVAILABLE)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _not_all_came(given: tuple, timeout_s: float) -> str:
    fix = (
        "Start all of them with the same coordinator and num_processes and with different "
        "values of process_id, on hosts that can reach the coordinator's port; raise "
        "timeout_s if they start slowly."
    )
    cluster, started = _cluster() if None in given else None, _keras.started_as()
    source = {}
    if cluster is not None:
        _, count, start = _CLUSTERS[cluster]
        source = {"found by JAX in": f"{cluster} ({count}={os.environ.get(count)})"}
        fix = (
            f"{cluster} must start this program in each of its tasks (`{start}`), on hosts that "
            "can reach the coordinator's port; raise timeout_s if they start slowly."
        )
    elif None in given and started[0] is not None:
        source = {"found by JAX in": "the environment"}
    return message(
        "All processes must call ktd.initialize().",
        # Without a coordinator JAX is still looking for one.
        received=dict(zip(_ARGUMENTS, given if started[0] is None else started, strict=True))
        | source
        | {"waited_s": timeout_s},
        fix=fix,
    )


def _bind_address(coordinator: str | None) -> str | None:
    """The address that the coordinator binds to, or `None` for JAX's default, which is any."""
    host = (coordinator or "").rpartition(":")[0]
    local = host in _LOOPBACK or host.startswith("127.")
    return coordinator if local and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ else None


def end_with_launcher() -> None:
    """Ends this process when the launcher that started it is gone, if there was one."""
    launcher = int(os.environ.pop(LAUNCHER, 0))
    if launcher and os.name == "posix":
        thread = threading.Thread(target=_end_with, args=(launcher,), name="ktd-launcher")
        thread.daemon = True
        thread.start()


def _end_with(launcher: int) -> None:
    # The launcher is the parent, unless its command is a shell that starts this program.
    is_parent = os.getppid() == launcher
    while os.getppid() == launcher if is_parent else _lives(launcher):
        time.sleep(_POLL_LAUNCHER_S)
    logger.critical("the launcher, process %d, is gone: this process ends", launcher)
    os._exit(watch.EXIT_PEER)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _given(coordinator, num_processes, process_id) -> tuple[str | None, int | None, int | None]:
    """The arguments, or the launcher's if there are none."""
    if (coordinator, num_processes, process_id) == _NOTHING and COORDINATOR in os.environ:
        number, process = os.environ[NUM_PROCESSES], os.environ[PROCESS_ID]
        return os.environ[COORDINATOR], int(number), int(process)
    return coordinator, num_processes, process_id


def _check(coordinator: Any, num_processes: Any, process_id: Any) -> None:
    host, _, port = str("host:0" if coordinator is None else coordinator).rpartition(":")
    counted = num_processes is None or is_count(num_processes, 1)
    numbered = process_id is None or is_count(process_id, 0)
    if (host and port.isdigit() and counted and numbered) and (
        num_processes is None or process_id is None or process_id < num_processes
    ):
        return
    raise value_error(
        "The coordinator is host:port, and process_id counts from 0 to num_processes - 1.",
        received=dict(zip(_ARGUMENTS, (coordinator, num_processes, process_id), strict=True)),
        fix=_FIX,
    )


def _check_same(given: tuple) -> None:
    started = _keras.started_as()
    if any(new not in (None, old) for new, old in zip(given, started, strict=True)):
        raise runtime_error(
            "A process can be initialized only once.",
            received=dict(zip(_ARGUMENTS, given, strict=True)) | {"initialized as": started},
            fix="Leave the second call out.",
        )
