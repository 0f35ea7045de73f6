"""Dry runs of no compiler, to draw: numbers by hand, and names that would break a page."""

from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.dryrun.build import StateBytes
from keras_tpu_dist.tools.dryrun.figures import estimate
from keras_tpu_dist.tools.dryrun.report import DryRun
from keras_tpu_dist.tools.hlo.analysis import Buffer, LayerCost, ProgramCost
from keras_tpu_dist.tools.hlo.collectives import Collective
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried

GIB = 2**30
EVIL = "</script><script>document.title='evil'</script><img src=x onerror=alert(1)>"


def collective(axes, kind="all-reduce", layer="up", size=2**22, network="ICI", times=3):
    return Collective(
        *(kind, "name", layer, "backward", axes, 4, size, times, False, network, 1.5 * size, 1e-4)
    )


def made_run(topology="v5e:4x4", mesh=None, layers=12, **changes):
    """A dry run of a slice, whatever its mesh."""
    of = Topology.parse(topology)
    mesh = mesh or {"data": of.num_devices // 4, "model": 4}
    names = [EVIL, *(f"block_{n}/dense" for n in range(layers - 1))]
    costs = tuple(
        LayerCost(name, 10**9 * (n + 1), 2**24 * (n + 1), 10**5 * (layers - n), 6 * 10**4, 1e-5 * n)
        for n, name in enumerate(names)
    )
    collectives = (
        *(collective((name,)) for name in mesh),
        collective(tuple(mesh), "all-gather", EVIL, 2**18),
    )
    cost = ProgramCost(
        sum(c.flops for c in costs),
        (("bfloat16", sum(c.flops for c in costs)),),
        sum(c.hbm_bytes for c in costs),
        sum(c.cycles for c in costs),
        costs,
        collectives,
        (Buffer(2**28, "bf16[8,512,2048]", EVIL, "x"),),
    )
    gib = 2**30
    memory = {
        "arguments": 5 * gib,
        "outputs": 4 * gib,
        "aliased": 4 * gib,
        "temporaries": 6 * gib,
        "code": 2**24,
    }
    options = {
        "mode": "train",
        "compiled_for": of.name,
        "mesh": tuple(mesh.items()),
        "batch_size": 1024,
        "parameters": 1_234_567,
        "fits": True,
        "limit_bytes": of.hbm_bytes,
        "total_bytes": 11 * gib + 2**24,
        "memory": memory,
        "state": StateBytes(gib, 2 * gib, 400, gib // 8, gib // 2),
        "cost": cost,
        "estimate": estimate(cost, of),
        "effort": "quick",
        "tokens": 0,
        "error": None,
        "sized_on": None,
        "rematerialized": (),
        "build_seconds": 1.0,
        "compile_seconds": 2.0,
        "compile_cpu_seconds": 3.0,
        "compile_peak_bytes": gib,
        "notes": (f"a note about {EVIL}",),
    }
    return DryRun(**{**options, **changes})


def made_comparison(topology="v5e:4x4"):
    """Candidates that fit, one that does not, one without a time, one that is an error."""
    gib = 2**30
    rows = [
        ("replicated", 9, True),
        ("fsdp", 3, True),
        ("auto", 5, True),
        ("replicated", 19, False),
    ]
    candidates = []
    for n, (layout, size, fits) in enumerate(rows):
        mesh = {"data": 16 // 2**n, "model": 2**n}
        run = made_run(topology, mesh=mesh, layers=4 + 2 * n, total_bytes=size * gib, fits=fits)
        if not fits:
            run = made_run(topology, mesh=mesh, total_bytes=size * gib, fits=False, estimate=None)
        candidates.append(tried(Candidate(tuple(mesh.items()), layout), topology, run=run))
    bad = tried(Candidate((("data", 3),), EVIL), topology, error=f"sizes multiply to 3 {EVIL}")
    return Ranking((topology,), (*candidates, bad))


def tried(candidate, topology="v5e:4x4", rows=1024, **options):
    return Tried(candidate, Topology.parse(topology), rows, **options)
