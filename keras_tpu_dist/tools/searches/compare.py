"""Compares meshes and layouts: dry-runs every pair under its own strategy, and ranks them."""

import functools
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from keras_tpu_dist.common.checks import FUNCTION, PositiveInt, known_words
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.calibration import Calibration, calibrated
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.dryrun.run import Build, Progress, check_how
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.parallel import compiled_together
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried, rank
from keras_tpu_dist.tools.searches.search import compiled_step, lowered_step

logger = logging.getLogger("keras_tpu_dist")


@known_words
def compare(
    build: Annotated[Build, FUNCTION],
    *,
    topology: str | Topology,
    meshes: Iterable[dict[str, int]],
    layouts: Sequence[Any] = (None,),
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: PositiveInt | None = None,
    batch_size: PositiveInt,
    mode: str = "train",
    timeout: float = 1800.0,
    progress: Progress | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> Ranking:
    """Dry-runs every mesh with every layout and ranks those that fit by estimated step time.

    The arguments that are not listed are those of `dry_run`.

    Args:
        topology: The slice.
        meshes: Dicts of axis sizes.
        layouts: Values for the `layout` of `TPUStrategy`.
        batch_size: Rows of all devices together.

    Returns:
        A `Ranking`. If a candidate cannot be built, because its mesh or layout does not fit the
        slice or the model, it comes last, with its error.

    Raises:
        ValueError: If `meshes` or `layouts` is a single one instead of a list, or `calibration` is
            of another chip.

    Example:

    >>> import keras
    >>> from keras_tpu_dist import compare
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> meshes = [{"data": 8}, {"data": 4, "model": 2}]
    >>> ranked = compare(build, topology="v5e:2x4", meshes=meshes, batch_size=64)  # doctest: +SKIP
    >>> dict(ranked.best.mesh)  # doctest: +SKIP
    {'data': 8}
    """
    meshes, layouts = _listed(meshes, layouts)
    # Parsed here, so that an error comes once and not for every mesh.
    topology = Topology.parse(topology)
    _, measured = calibrated(topology, calibration)
    check_how(mode, timeout, progress)
    start, tell = time.monotonic(), progress or logger.debug
    inputs = Inputs(x, y, sample_weight, sequence_length)
    pairs = [(mesh, layout) for mesh in meshes for layout in layouts]
    with stages("comparing", len(pairs)) as begin:
        found, _ = compiled_together(
            [Tried(Candidate(tuple(m.items()), layout), batch_size) for m, layout in pairs],
            functools.partial(lowered_step, build, topology, inputs, None, measured, mode=mode),
            functools.partial(compiled_step, How(timeout=timeout)),
            begin=lambda tried: (begin(tried), tell(f"compiling {tried}")),
            until=math.inf,
            first=True,
        )
    return Ranking(
        topology=topology.name,
        compiled=tuple(sorted(found, key=rank)),
        seconds=time.monotonic() - start,
        calibration="" if measured is None else str(measured),
    )


def _listed(meshes: Any, layouts: Any) -> tuple[list, list]:
    """Meshes and layouts as lists; a single one would be iterated over instead."""
    several = all(
        isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
        for given in (meshes, layouts)
    )
    listed = list(meshes) if several else []
    if (
        not several
        or not listed
        or not list(layouts)
        or not all(isinstance(mesh, Mapping) for mesh in listed)
    ):
        raise value_error(
            "compare needs a list of meshes, which are dicts of axis sizes, and a list of layouts.",
            received={"meshes": listed or meshes, "layouts": layouts},
            fix='Write for example meshes=[{"data": 8}], layouts=[None, "fsdp"].',
        )
    return listed, list(layouts)
