"""What a model with tables can be made of, and programs drawn from it. Imports no Keras."""

import random
from typing import Any

from drawing import Program

# Whether rows without a gradient stay as they are, so that "lazy" changes nothing.
ROW_WISE = ("sgd", "adagrad", "schedule")
DENSE = (
    *("momentum", "nesterov", "adam", "amsgrad", "adamw", "rmsprop", "lamb", "ftrl", "adadelta"),
    *("adafactor", "loss scale"),
)
OPTIONS: dict[str, tuple] = {
    "model": (
        *("one", "masked", "two lookups", "two tables", "tied", "tied and flat", "scalar"),
        *(
            "nested",
            "regularized",
            "constrained",
            "frozen",
            "lora",
            "int8",
            "taken",
            "positions",
            "penalized",
        ),
        *("one_hot", "dropout", "normalized", "sliced", "twice in turn"),
    ),
    "place": (
        *("8 rows", "8 columns", "8 fsdp", "4x2 rows", "4x2 columns", "4x2 rows by model"),
        *("4x2 rows by both", "4x2 tensor_parallel", "4x2 auto", "2x2x2 rows"),
        *("2x2x2 rows by two", "2x2x2 rows by two, otherwise", "2x2x2 rows and columns"),
        *("2x2x2 rows by two, columns", "2x2x2 columns by two", "2x2x2 fsdp"),
    ),
    # How "auto" chooses: by its own rule, or always by width where it is not by rows.
    "tables": ("auto", "width", "width", "rows", "lazy", None),
    "width": (8, 16, 24),
    "optimizer": (*ROW_WISE, *DENSE),
    "extra": (
        *(None, None, "clipnorm", "global_clipnorm", "clipvalue", "ema", "ema at end"),
        *("accumulation", "decay"),
    ),
    "policy": ("float32", "float32", "mixed_bfloat16"),
    "rows": (7, 13, 24, 37),
    "batch_size": (5, 8, 13),
    "steps": (1, 3, 4, "auto"),
    "ids": ("random", "equal", "one owner", "distinct"),
    "ids_dtype": ("int32", "int64", "uint8", "float32"),
    "input": ("arrays", "pydataset", "tf.data", "generator"),
    "trainer": ("fit", "fit", "fit", "on_batch"),
    "weighted": (False, True),
    "callbacks": ("none", "none", "name_nan", "assigns", "predicts beside"),
    "donate_state": ("auto", True, False),
    "remat": (None, None, "full"),
    "shard_optimizer": (False, False, True),
    "then": ("nothing", "nothing", "again", "frozen", "reloaded", "resumed elsewhere"),
}


def is_legal(choices: dict[str, Any]) -> bool:
    """Whether one device and the mesh are to give the same."""
    if choices["tables"] == "lazy":
        still = choices["optimizer"] in ROW_WISE and choices["extra"] in (None, "clipvalue")
        if not still or choices["model"] in ("tied", "regularized", "constrained", "penalized"):
            return False
    if choices["optimizer"] == "adamw" and choices["extra"] == "decay":
        return False  # it has one
    if choices["trainer"] == "on_batch":
        # What `fit` alone does.
        return choices["callbacks"] == "none" and choices["then"] != "resumed elsewhere"
    return True


def drawn(seed: int, given: dict[str, Any] | None = None) -> Program:
    """A program, the same for each seed.

    Raises:
        ValueError: If what is given is not legal.
    """
    rng = random.Random(seed)
    for _ in range(1000):
        choices = {name: rng.choice(values) for name, values in OPTIONS.items()} | (given or {})
        if is_legal(choices):
            return Program(seed, choices)
    raise ValueError(f"no legal program has {given}")
