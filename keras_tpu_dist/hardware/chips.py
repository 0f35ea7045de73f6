"""TPU generations: their numbers, and the source of every number."""

from dataclasses import dataclass

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """One TPU generation. Speeds and memory are per chip unless the name says otherwise.

    Args:
        name: Google's short name, as in `"v5e"`.
        device_kind: The `jax.Device.device_kind` of its devices.
        aliases: Other spellings in use.
        dims: Dimensions of the torus, 2 or 3.
        cores: TensorCores per chip.
        devices: JAX devices per chip: 1 if the cores act as one ("megacore"), else `cores`.
        counts: What the number in `"v4-8"` counts: `"cores"` or `"chips"`.
        shapes: The shapes on offer below the size from which on all sides are multiples of four.
        pod: Chips of the largest slice.
        chips_per_host: Chips per host, in a slice of several hosts.
        one_host_chips: Chips of the largest slice with a single host.
        device_hbm_bytes: Memory of one JAX device that the compiler may use.
        vmem_bytes: On-chip memory of one TensorCore.
        hbm_bandwidth: Bytes per second.
        flops: Peak operations per second by dtype, as pairs.
        clock: TensorCore clock in hertz, which turns the compiler's cycles into seconds.
        link_bandwidth: Bytes per second of one inter-chip link in one direction.
        dcn_bandwidth: Bytes per second per chip to other slices; 0 if slices cannot be joined.
        assumed: Names of the numbers above that are not published; for the reasons, see the
            comments beside them.
    """

    name: str
    device_kind: str
    aliases: tuple[str, ...]
    dims: int
    cores: int
    devices: int
    counts: str
    shapes: tuple[tuple[int, ...], ...]
    pod: int
    chips_per_host: int
    one_host_chips: int
    device_hbm_bytes: int
    vmem_bytes: int
    hbm_bandwidth: float
    flops: tuple[tuple[str, float], ...]
    clock: float
    link_bandwidth: float
    dcn_bandwidth: float
    assumed: tuple[str, ...] = ()


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_OLD_FLAT = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# Sources, by the letters beside the numbers:
#   G  Google's specification tables, docs.cloud.google.com/tpu/docs/v3, .../v4, .../v5e, .../v5p,
#      .../v6e, .../tpu7x, and "TPU machines in accelerator-optimized machine family" of Compute
#      Engine's (v5p, v6e, tpu7x). One link in one direction is "bidirectional ICI bandwidth per
#      chip" over two directions and the number of links (4 in two dimensions, 6 in three), or
#      "all-reduce bandwidth per pod" over chips and links.
#   J  JAX, jax/_src/pallas/mosaic/tpu_info.py of 0.10.2.
#   S  "How to Scale Your Model", chapter 2, jax-ml.github.io/scaling-book/tpus. Its links are 10 %
#      slower than G's on v5e and later, and faster on v3 (1e11).
#   C  Clock: peak / (2 x 128 x 128 x matrix units), with the number of units from G (v2: one in a
#      core). At these clocks libtpu 0.0.42.1 estimates an 8192^3 bfloat16 matmul at 1.02 (v2),
#      1.03 (v3), 1.08 (v4), 1.14 (v5e) and 1.11 (v5p) times its time at peak.
#   M  Clock at which the same estimate is what was measured: 1.11 times the time at peak on v6e,
#      1.24 on tpu7x (1.29 for 4096^3, 1.21 for 16384^3): github.com/AI-Hypercomputer/tpu-recipes,
#      microbenchmarks/README.md and microbenchmarks/ironwood/README.md.
#   L  libtpu 0.0.42.1: the "available HBM" in its message if a program does not fit.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v2",
            device_kind="TPU v2",
            aliases=(),
            dims=2,
            cores=2,
            devices=2,
            counts="cores",
            shapes=_OLD_FLAT,
            pod=256,
            chips_per_host=4,
            one_host_chips=4,
            device_hbm_bytes=int(7.48 * _GIB),  # L
            vmem_bytes=16 * _MIB,  # J
            hbm_bandwidth=716e9,  # J
            flops=(("bfloat16", 46e12),),  # J
            clock=0.70e9,  # C
            link_bandwidth=62e9,  # no specification found
            dcn_bandwidth=0.0,
            assumed=("link_bandwidth",),
        ),
        Chip(
            name="v3",
            device_kind="TPU v3",
            aliases=(),
            dims=2,
            cores=2,
            devices=2,
            counts="cores",
            shapes=(*_OLD_FLAT, (16, 32), (32, 32)),
            pod=1024,
            chips_per_host=4,
            one_host_chips=4,
            device_hbm_bytes=int(15.48 * _GIB),  # L
            vmem_bytes=16 * _MIB,  # J
            hbm_bandwidth=900e9,  # G
            flops=(("bfloat16", 123e12),),  # G
            clock=0.94e9,  # C
            link_bandwidth=83e9,  # G: 340 TB/s per pod
            dcn_bandwidth=0.0,
        ),
        Chip(
            name="v4",
            device_kind="TPU v4",
            aliases=("v4p",),
            dims=3,
            cores=2,
            devices=1,
            counts="cores",
            shapes=_SMALL_CUBES,
            pod=4096,
            chips_per_host=4,
            one_host_chips=4,
            device_hbm_bytes=int(30.75 * _GIB),  # L
            vmem_bytes=16 * _MIB,  # J
            hbm_bandwidth=1200e9,  # G
            flops=(("bfloat16", 275e12), ("int8", 275e12)),  # G
            clock=1.05e9,  # C
            link_bandwidth=45e9,  # G: 1.1 PB/s per pod; S
            dcn_bandwidth=6.25e9,  # no specification found; v5p's
            assumed=("dcn_bandwidth",),
        ),
        Chip(
            name="v5e",
            device_kind="TPU v5 lite",
            aliases=("v5litepod", "v5lite"),
            dims=2,
            cores=1,
            devices=1,
            counts="chips",
            shapes=_FLAT,
            pod=256,
            chips_per_host=4,
            one_host_chips=8,  # G: ct5lp-hightpu-8t
            device_hbm_bytes=int(15.75 * _GIB),  # L
            vmem_bytes=128 * _MIB,  # J
            hbm_bandwidth=819e9,  # G
            flops=(("bfloat16", 197e12), ("int8", 393e12)),  # G
            clock=1.50e9,  # C, S
            link_bandwidth=50e9,  # G: 400 GBps
            dcn_bandwidth=3.125e9,  # G: 6.4 Tbps per pod
        ),
        Chip(
            name="v5p",
            device_kind="TPU v5",
            aliases=(),
            dims=3,
            cores=2,
            devices=1,
            counts="cores",
            shapes=_SMALL_CUBES,
            pod=8960,
            chips_per_host=4,
            one_host_chips=4,
            device_hbm_bytes=int(95.74 * _GIB),  # L
            vmem_bytes=64 * _MIB,  # J
            hbm_bandwidth=2765e9,  # G
            flops=(("bfloat16", 459e12), ("int8", 918e12)),  # G; int8: S, J
            clock=1.75e9,  # C
            link_bandwidth=100e9,  # G: 1200 GBps
            dcn_bandwidth=6.25e9,  # G: 50 Gbps
        ),
        Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            aliases=("trillium",),
            dims=2,
            cores=1,
            devices=1,
            counts="chips",
            shapes=_FLAT,
            pod=256,
            chips_per_host=4,
            one_host_chips=8,  # G: ct6e-standard-8t
            device_hbm_bytes=int(31.25 * _GIB),  # L
            vmem_bytes=128 * _MIB,  # J
            hbm_bandwidth=1638e9,  # G
            flops=(("bfloat16", 918e12), ("int8", 1836e12)),  # G
            clock=2.24e9,  # none published: M. The rule of C gives 3.5, faster than libtpu
            link_bandwidth=100e9,  # G: 800 GBps
            dcn_bandwidth=12.5e9,  # G: 100 Gbps
            assumed=("clock",),
        ),
        Chip(
            name="tpu7x",
            device_kind="TPU7x",
            aliases=("v7x", "7x", "ironwood"),
            dims=3,
            cores=2,
            devices=2,
            counts="cores",
            shapes=_SMALL_CUBES,
            pod=9216,
            chips_per_host=4,
            one_host_chips=4,
            device_hbm_bytes=int(94.75 * _GIB),  # L
            vmem_bytes=64 * _MIB,  # J
            hbm_bandwidth=7380e9,  # G
            flops=(("bfloat16", 2307e12), ("float8", 4614e12)),  # G
            clock=2.20e9,  # none published: M
            link_bandwidth=100e9,  # G: 1200 GBps
            dcn_bandwidth=12.5e9,  # G: 100 Gbps
            assumed=("clock",),
        ),
    )
}


# By `device_kind`: chips for which Pallas kernels do not compile, or not in bfloat16.
WITHOUT_KERNELS = ("TPU v2", "TPU v3")


def of_kind(device_kind: str) -> Chip | None:
    """The generation with this device kind, or `None`.

    Args:
        device_kind: A `jax.Device.device_kind`, such as `"TPU v5 lite"`.
    """
    return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)


def simulated_chip(platform: str, device_kind: str, per_host: int) -> Chip:
    """A substitute for a device that is not a TPU: one of a line, without known speeds.

    Args:
        platform: `"cpu"` or `"gpu"`.
        device_kind: The `jax.Device.device_kind`.
        per_host: Devices of one process.

    Returns:
        A `Chip` whose memory and rates are 0: unknown.
    """
    return Chip(
        name=platform,
        device_kind=device_kind,
        aliases=(),
        dims=1,
        cores=1,
        devices=1,
        counts="chips",
        shapes=(),
        pod=0,
        chips_per_host=per_host,
        one_host_chips=per_host,
        device_hbm_bytes=0,
        vmem_bytes=0,
        hbm_bandwidth=0.0,
        flops=(("bfloat16", 0.0),),
        clock=0.0,
        link_bandwidth=0.0,
        dcn_bandwidth=0.0,
    )
