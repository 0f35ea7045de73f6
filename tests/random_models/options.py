"""What a program can be made of, and programs drawn so that every pair of options meets."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

OPTIONS: dict[str, tuple] = {
    "model": (
        *("vectors", "normalized", "masked", "images", "tokens", "nested", "shared", "two_inputs"),
        *("recurrent", "experts", "assigned", "split", "blocks", "nested_masked"),
        *("two_outputs", "augmented", "grouped", "strided", "shifted"),
    ),
    "mesh": ("8", "4x2", "2x4", "2x2x2", "2x2t2", "t2x4"),
    "layout": ("none", "rules", "fsdp", "tensor_parallel", "auto"),
    "rows": (7, 13, 24, 37),
    "batch_size": (5, 8, 16),
    "steps_per_execution": (1, 3, "auto"),
    "steps_per_epoch": (None, 2, 5),
    "input": ("arrays", "generator", "pydataset", "tf.data", "torch", "grain"),
    "weighted": ("no", "sample_weight", "class_weight"),
    "reduction": ("sum_over_batch_size", "sum", "mean_with_sample_weight"),
    "trainer": ("fit", "compute_loss", "on_batch"),
    "optimizer": ("sgd", "adam", "clipped", "accumulated", "averaged", "scaled"),
    "policy": ("float32", "mixed_bfloat16"),
    "remat": (None, "full", "dots", "attention"),
    "blocks": ("one by one", "scanned"),
    "donate_state": ("auto", True, False),
    "prefetch": (None, 2),
    "shard_optimizer": (False, True),
    "run_eagerly": (False, True),
    "callbacks": ("none", "batches", "name_nan", "early_stopping"),
    "validation": ("none", "data", "steps"),
    "where": ("inside", "outside", "moved"),
    "shuffle": (False, True),
    # What happens to the trained model before it is trained once more; half of them end before.
    "then": (*6 * ("nothing",), "again", "frozen", "lora", "recompiled", "pickled", "reloaded"),
}
# Libraries that a machine may lack; a program drawn with one then reads arrays.
LIBRARIES = {"tf.data": "tensorflow", "torch": "torch", "grain": "grain"}


@dataclass(frozen=True)
class Program:
    """One choice for every option.

    Attributes:
        seed: What it was drawn from.
        choices: From each option's name to its value.
    """

    seed: int
    choices: dict[str, Any] = field(hash=False)

    def __str__(self):
        words = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        return f"seed {self.seed}: {words}"

    def to_dict(self) -> dict[str, Any]:
        """The program as plain values."""
        return asdict(self)


# Models with a class for each token.
BY_TOKEN = ("tokens", "experts", "blocks", "grouped")
# What a loop over batches does not know.
_OF_FIT = {
    **{"input": "arrays", "callbacks": "none", "validation": "none", "shuffle": False},
    **{"steps_per_epoch": None},
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_legal(choices: dict[str, Any]) -> bool:
    """Whether Keras itself allows the combination, on one device."""
    given = choices.get
    arrays = given("input") in ("arrays", None)
    if given("weighted") == "class_weight" and given("model") in (*BY_TOKEN, "two_outputs"):
        return False  # one class for a row is needed
    if given("trainer") == "on_batch" and any(
        choices.get(name, value) != value for name, value in _OF_FIT.items()
    ):
        return False
    if given("weighted") == "class_weight" and given("input") in ("generator", "torch", "grain"):
        return False  # for inputs that Keras can map or slice
    if not arrays and given("shuffle"):
        return False  # the input's own order
    if given("model") in ("assigned", "split") and given("mesh") in ("8", "t2x4"):
        return False  # one logical device, or no axis "model"
    if given("blocks") == "scanned" and given("model") != "blocks":
        return False  # there are none
    if given("input") == "grain" and given("validation") != "none" and _ends_with_an_epoch(choices):
        return False  # Keras fails in the next epoch, whose first step never comes
    # Every operation is compiled alone, for minutes.
    large = ("masked", "images", "recurrent", "augmented", "strided", *BY_TOKEN)
    return not (given("run_eagerly") and given("model") in large)


def _ends_with_an_epoch(choices: dict[str, Any]) -> bool:
    rows, size, steps = (choices.get(n) for n in ("rows", "batch_size", "steps_per_epoch"))
    return None not in (rows, size, steps) and -(-rows // size) == steps


def drawn(seed: int, fixed: Iterable[tuple[str, Any]] = ()) -> Program:
    """A program, the same for each seed.

    Args:
        seed: The seed.
        fixed: Options that are given.

    Raises:
        ValueError: If what is given is not legal.
    """
    rng = random.Random(seed)
    fixed = dict(fixed)
    for _ in range(1000):
        choices = {name: fixed.get(name, rng.choice(values)) for name, values in OPTIONS.items()}
        if choices["trainer"] == "on_batch":
            choices |= {name: value for name, value in _OF_FIT.items() if name not in fixed}
        if is_legal(choices):
            return Program(seed, choices)
    raise ValueError(f"no legal program has {fixed}")


def pairs_of(program: Program) -> set[Pair]:
    """The pairs of options that meet in a program."""
    return set(itertools.combinations(sorted(program.choices.items(), key=lambda c: c[0]), 2))


def all_pairs() -> set[Pair]:
    """Every pair of options that may meet."""
    names = sorted(OPTIONS)
    return {
        ((a, one), (b, other))
        for a, b in itertools.combinations(names, 2)
        for one in OPTIONS[a]
        for other in OPTIONS[b]
        if is_legal({a: one, b: other})
    }


def covering(programs: list[Program], seed: int) -> list[Program]:
    """The programs, and more until every pair of options has met.

    Args:
        programs: Programs to begin with.
        seed: The seed of the first one that is added.
    """
    found = list(programs)
    missing = all_pairs().difference(*map(pairs_of, found))
    while missing:
        pair = min(missing, key=repr)
        candidates = [drawn(seed + n, pair) for n in range(40)]
        best = max(candidates, key=lambda each: len(pairs_of(each) & missing))
        found.append(best)
        missing -= pairs_of(best)
        seed = best.seed + 1
    return found
