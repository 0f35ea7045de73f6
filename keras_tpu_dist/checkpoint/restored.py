"""What loading a checkpoint did."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Restored:
    """What `restore` did.

    Attributes:
        directory: Where the checkpoint is.
        step: Its step.
        loaded: Paths of the variables that were loaded.
        kept: Paths of those that were left as they are: excluded, or not in the checkpoint.
        unused: Paths in the checkpoint that went nowhere.
        renamed: From a saved path to the path here, where they differ.
        optimizer: Whether the optimizer's state was loaded as well.
    """

    directory: str
    step: int
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    renamed: dict[str, str]
    optimizer: bool

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        lines = [f"step {self.step} of {self.directory}: {len(self.loaded)} variables loaded"]
        lines += [f"  kept   {path}" for path in self.kept]
        lines += [f"  unused {path}" for path in self.unused]
        lines += [f"  {old} -> {new}" for old, new in self.renamed.items()]
        lines.append(f"  optimizer state {'loaded' if self.optimizer else 'left as it is'}")
        return "\n".join(lines)
