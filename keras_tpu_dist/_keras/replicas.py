"""Private names for programs given as text, which run as replicas. Imports no Keras."""

from collections.abc import Sequence
from typing import Any


def compiled_replicas(text: str, devices: Sequence[Any]) -> Any:
    """Compiles HLO for CPU devices, one replica on each.

    Public replacement: none; `jax.export` reads StableHLO alone, which has no replicas.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import _jax

    module = _module_of(text)
    program = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    options = compiler.get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.arange(len(devices)).reshape(len(devices), 1),
    )
    options.executable_build_options.use_spmd_partitioning = False
    options.executable_build_options.use_shardy_partitioner = False
    return devices[0].client.compile_and_load(program, _jax.DeviceList(tuple(devices)), options)


def is_read(text: str) -> bool:
    """Whether XLA reads a program: it has no operation that this jaxlib does not know.

    Public replacement: none, as for `compiled_replicas`.
    """
    try:
        _module_of(text)
    except Exception:  # of XLA's parser: a ValueError, an XlaRuntimeError
        return False
    return True


def _module_of(text: str) -> Any:
    from jax._src.lib import _jax

    try:
        from jaxlib._hlo import hlo_module_from_text  # jaxlib 0.12
    except ImportError:
        hlo_module_from_text = _jax.hlo_module_from_text
    return hlo_module_from_text(text)


def whole_text(compiled: Any) -> str:
    """The text of a compiled program with the values of all of its constants.

    Public replacement: `Compiled.as_text`, which leaves out those of large constants.
    """
    from jax._src.lib import _jax

    try:
        from jaxlib._hlo import HloPrintOptions  # jaxlib 0.12
    except ImportError:
        HloPrintOptions = _jax.HloPrintOptions
    options = HloPrintOptions()
    options.print_large_constants = True
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.to_string(options)


def run_replicas(executable: Any, arguments: Sequence[Any]) -> list[list[Any]]:
    """Runs a program once."""
    return executable.execute_sharded(list(arguments)).disassemble_into_single_device_arrays()
