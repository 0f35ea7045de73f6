"""Private names of JAX's own runtime for several processes."""

from typing import Any

from jax._src import distributed


def started_as() -> tuple[str | None, int, int]:
    """The coordinator, the number of processes and this one's, as JAX was initialized.

    Public replacement: `jax.process_count()` and `jax.process_index()`, which start JAX's devices.
    """
    state = distributed.global_state
    return state.coordinator_address, state.num_processes, state.process_id


def coordination_client() -> Any:
    """JAX's client of the coordination service: a store of keys that all processes see.

    Public replacement: none; `jax.experimental.multihost_utils` talks over the devices.
    """
    return distributed.global_state.client
