"""Shared by all kinds of files: the report of loading, and the slots of an optimizer."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.training import membership


@dataclass(frozen=True, repr=False)
class Restored(Printed):
    """The report of `restore`.

    Attributes:
        directory: The directory of the checkpoint.
        step: Its step.
        loaded: Paths of the variables that were loaded.
        kept: Paths of the unchanged variables: excluded, or not in the checkpoint.
        unused: Paths in the checkpoint without a variable.
        renamed: A dict from a saved path to the model's path, if they differ.
        optimizer: Whether the optimizer's state was loaded, too.
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


def build_optimizer(model: Any) -> None:
    """Creates the slots of a model's optimizer, if it has not trained yet, to load saved ones."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    member = membership.of_model(model)
    scope = contextlib.nullcontext() if member is None else member.strategy.scope()
    with scope:
        optimizer.build(model.trainable_variables)
