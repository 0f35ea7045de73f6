"""Values between blocks whole, and split along time: the TPU compiler's figures; no chip is used.

    python benchmarks/between_blocks.py                  # data 4 x model 4, effort exact
    python benchmarks/between_blocks.py --effort quick
    python benchmarks/between_blocks.py --scanned        # fsdp 4 x model 4, one loop, recomputed
    python benchmarks/between_blocks.py --rings          # with products that XLA cuts into rings

A decoder of two layers (width 2048, 16 heads, MLP 8192, 2,048 tokens a row, bfloat16) under
`Planner("tensor_parallel", between_blocks=...)` on v5e:4x4: collectives over the tensor axis, bytes
that a device sends, memory, cycles. Needs libtpu (pip install 'jax[tpu]').
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
from collections import Counter

from published import Decoder

from keras_tpu_dist.hardware.compiler_options import OVERLAP
from keras_tpu_dist.layout.planner import Planner
from keras_tpu_dist.show.text import duration_text, size_text, text_table

TOPOLOGY = "v5e:4x4"
# Every product that is split is cut, however small.
RINGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 0}
HEADER = (
    *("between", "over model", "sent over model", "sent in all", "temporaries", "cycles"),
    *("not overlapped", "step"),
)


def build(layers: int, scanned: bool):
    """The decoder, compiled."""
    model = Decoder(2048, 16, 16, 8192, layers).build()
    ktd.scan_blocks(model, scanned)
    return model


def row(between_blocks: str, asked: argparse.Namespace) -> tuple[str, ...]:
    """The figures of one dry run."""
    mesh = {"fsdp" if asked.scanned else "data": 4, "model": 4}
    kind = "auto" if asked.scanned else "tensor_parallel"
    planner = Planner(kind, memory_bytes=1, between_blocks=between_blocks)
    remat = "full" if asked.scanned else None
    strategy = ktd.TPUStrategy(
        mesh,
        planner,
        topology=TOPOLOGY,
        remat=remat,
        head="whole",
        compiler_options={**OVERLAP, **RINGS} if asked.rings else "auto",
    )
    layers = 4 if asked.scanned else 2
    run = ktd.dry_run(
        lambda: build(layers, asked.scanned), strategy, batch_size=16, effort=asked.effort
    )
    # What sums the loss and the gradients of norms is far below a megabyte.
    large = [c for c in run.cost.collectives if c.bytes > 1e6]
    over_model = [c for c in large if c.axes == ("model",)]
    counts = Counter({c.kind: 0 for c in over_model})
    for collective in over_model:
        counts[collective.kind] += round(collective.times)
    return (
        between_blocks,
        ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())),
        f"{sum(c.sent_bytes * c.times for c in over_model) / 1e6:.1f} MB",
        f"{sum(c.sent_bytes * c.times for c in large) / 1e6:.1f} MB",
        size_text(run.memory["temporaries"]),
        f"{run.cost.cycles / 1e6:.2f} M",
        duration_text(run.cost.exposed_link_seconds),
        duration_text(run.estimate.step),
    )


def main() -> None:
    """Prints a row for each choice."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--effort", choices=["quick", "exact"], default="exact")
    arguments.add_argument("--scanned", action="store_true")
    arguments.add_argument("--rings", action="store_true")
    asked = arguments.parse_args()
    print(text_table(HEADER, [row(choice, asked) for choice in ("whole", "split")]))


if __name__ == "__main__":
    main()
