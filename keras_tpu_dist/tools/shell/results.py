"""The answers of commands that have no Python function."""

from dataclasses import asdict, dataclass
from typing import Any

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import size_text, text_table


@dataclass(frozen=True, repr=False)
class SliceTable(Printed):
    """TPU slices by name."""

    slices: tuple[Topology, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """The slices as plain data."""
        return [slice_.to_dict() for slice_ in self.slices]

    def __str__(self) -> str:
        header = ("slice", "type", "chips", "devices", "hosts")
        header += ("HBM/device", "bf16 TFLOP/s", "HBM GB/s")
        rows = [
            (
                s.name,
                _accelerator_type(s),
                str(s.num_chips),
                str(s.num_devices),
                str(s.num_hosts),
                size_text(s.hbm_bytes),
                f"{s.peak_flops() / 1e12:,.0f}",
                f"{s.hbm_bandwidth / 1e9:,.0f}",
            )
            for s in self.slices
        ]
        return (
            f"{text_table(header, rows)}\nOn 3D chips, the sides may be any multiples of 4. "
            "'2*v5e:16x16' is two slices."
        )


def _accelerator_type(topology: Topology) -> str:
    chip = topology.chip
    name = (chip.aliases or (chip.name,))[0] if chip.name == "v5e" else chip.name
    return f"{name}-{topology.num_chips * (chip.cores if chip.counts == 'cores' else 1)}"


@dataclass(frozen=True, repr=False)
class Converted(Printed):
    """The result of `ktd convert`.

    Attributes:
        layers: `(path, class)` of each layer that was replaced.
        output: The file that was written; `None` if there was no such layer.
    """

    model: str
    layers: tuple[tuple[str, str], ...]
    output: str | None

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self) -> str:
        if self.output is None:
            return f"{self.model}: there is no faster version of any layer, so nothing was written"
        table = text_table(("layer", "now"), self.layers)
        load = f"import keras_tpu_dist, keras; model = keras.saving.load_model({self.output!r})"
        return f"{self.model}: {len(self.layers)} layer(s) converted\n{table}\n{load}"
