"""What a program can be made of, and programs drawn so that every pair of options meets."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

from drawing import Program

# How a layer of the user's own moves rows or time, and what it does with them then.
MOVES = ("shift", "back", "roll", "gather", "concatenate", "flip", "pad", "update")
WRITES = (
    *("last", "first", "many", "add", "multiply", "slice", "scatter"),
    *("sums", "windows", "mean", "largest"),
)
# Layers that may be assigned to a logical device: from (rows, time, features) to the same shape.
ASSIGNED = (
    *("dense", "conv", "depthwise", "separable", "layer_norm", "rms_norm", "group_norm"),
    *("lstm", "gru", "attention", "dropout", "spatial_dropout", "einsum", "pool", "distributed"),
    *("sequential", "experts", "prelu", "moves", "batch_norm"),
)

# Optimizers under which rows without a gradient stay as they are: "lazy" changes nothing then.
ROW_WISE = ("sgd", "adagrad", "schedule")

OPTIONS: dict[str, tuple] = {
    "model": (
        *("vectors", "normalized", "masked", "images", "tokens", "nested", "shared", "two_inputs"),
        *("recurrent", "experts", "assigned", "split", "blocks", "nested_masked"),
        *("two_outputs", "augmented", "grouped", "strided", "shifted"),
        *("moved_rows", "moved_time", "assigned_pair", "deep", "tables"),
    ),
    "mesh": ("8", "4x2", "2x4", "2x2x2", "2x2t2", "t2x4"),
    "layout": ("none", "rules", "fsdp", "tensor_parallel", "split_between", "auto"),
    "rows": (7, 13, 24, 37),
    "batch_size": (5, 8, 16),
    "steps_per_execution": (1, 3, "auto"),
    "steps_per_epoch": (None, 2, 5),
    "input": ("arrays", "generator", "pydataset", "tf.data", "torch", "grain"),
    "weighted": ("no", "sample_weight", "class_weight"),
    "reduction": ("sum_over_batch_size", "sum", "mean_with_sample_weight"),
    # "replica": a loop of `strategy.run`, or with several steps a launch `strategy.loop`.
    "trainer": (*3 * ("fit",), "compute_loss", "on_batch", *2 * ("replica",)),
    "optimizer": (
        *("sgd", "adam", "clipped", "accumulated", "averaged", "averaged_at_end", "scaled"),
    ),
    "policy": ("float32", "mixed_bfloat16"),
    "remat": (None, "full", "dots", "attention"),
    "blocks": ("one by one", "scanned"),
    "donate_state": ("auto", True, False),
    "prefetch": (None, 2),
    "shard_optimizer": (False, True),
    "run_eagerly": (False, True),
    "callbacks": (
        *("none", "batches", "name_nan", "early_stopping"),
        *("assigns", "sets_rate", "compiles"),
    ),
    "validation": ("none", "data", "steps"),
    "where": ("inside", "outside", "moved"),
    "shuffle": (False, True),
    # What runs in another thread while fit trains the model; "fit" is that of another model.
    "beside": (*4 * ("nothing",), "predict", "evaluate", "fit"),
    "processes": (*7 * (1,), 2),
    # What happens to the trained model before it is trained once more; half of them end before.
    # "followed": another model takes its weights, by assigning each variable to one of its own.
    "then": (
        *7 * ("nothing",),
        *("again", "frozen", "lora", "recompiled", "pickled", "reloaded", "followed"),
    ),
}
# What one model alone can be made of. Pairs of these with others are not counted.
DETAILS: dict[str, dict[str, tuple]] = {
    "moved_rows": {"move": MOVES, "write": WRITES},
    "moved_time": {"move": MOVES, "write": WRITES},
    "assigned_pair": {
        "one": ASSIGNED,
        "other": ASSIGNED,
        "devices": ("01", "10", "00"),
        "in_turn": (False, True),
    },
    "tables": {
        "of": (
            *("one", "masked", "two lookups", "two tables", "tied", "tied and flat", "scalar"),
            *("nested", "regularized", "constrained", "frozen", "lora", "int8", "taken"),
            *("positions", "penalized", "one_hot", "dropout", "normalized", "sliced"),
            "twice in turn",
        ),
        "width": (8, 16, 24),
        # How the table lies; `None` leaves that to the layout.
        "place": (
            *("rows", "columns", "rows by the last", "rows by all", "rows by all, otherwise"),
            *("columns by all", "rows and columns", None),
        ),
        # How "auto" chooses: by its own rule, or always by width where it is not by rows.
        "use": ("auto", "width", "width", "rows", "lazy", None),
        "updates": (
            *(*ROW_WISE, "momentum", "nesterov", "adam", "amsgrad", "adamw", "rmsprop", "lamb"),
            *("ftrl", "adadelta", "adafactor", "loss scale"),
        ),
        "limit": (
            *(None, None, "clipnorm", "global_clipnorm", "clipvalue", "ema", "ema at end"),
            *("accumulation", "decay"),
        ),
        "ids": ("random", "equal", "one owner", "distinct"),
        "ids_dtype": ("int32", "int64", "uint8", "float32"),
    },
}
# Libraries that a machine may lack; a program drawn with one then reads arrays.
LIBRARIES = {"tf.data": "tensorflow", "torch": "torch", "grain": "grain"}


# Models with a class for each token.
BY_TOKEN = ("tokens", "experts", "blocks", "grouped", "moved_time", "assigned_pair")
# What a loop over batches does not know.
_OF_FIT = {
    **{"input": "arrays", "callbacks": "none", "validation": "none", "shuffle": False},
    **{"steps_per_epoch": None, "beside": "nothing"},
}
# And what a loop of replica code has no words for, or whose function does by itself.
_OF_COMPILE = {
    **{"weighted": "no", "reduction": "sum_over_batch_size", "run_eagerly": False},
    **{"remat": None, "blocks": "one by one", "prefetch": None},
}
# Trainers that are no fit, and what is fixed with each.
_LOOPS = {"on_batch": _OF_FIT, "replica": {**_OF_FIT, **_OF_COMPILE}}
# Models that replica code may train: none that draws at random, which each replica does by itself.
OF_REPLICAS = (
    *("normalized", "masked", "images", "tokens", "nested", "shared", "two_inputs", "recurrent"),
    *("experts", "split", "nested_masked", "grouped", "strided", "shifted"),
    *("moved_rows", "moved_time", "deep"),
)

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_legal(choices: dict[str, Any]) -> bool:
    """Whether Keras itself allows the combination, on one device."""
    given = choices.get
    arrays = given("input") in ("arrays", None)
    if given("weighted") == "class_weight" and given("model") in (*BY_TOKEN, "two_outputs"):
        return False  # one class for a row is needed
    fixed = _LOOPS.get(given("trainer"), {})
    if any(choices.get(name, value) != value for name, value in fixed.items()):
        return False
    if given("trainer") == "replica" and given("model") not in (None, *OF_REPLICAS):
        return False
    if _differs(choices):
        return False
    if given("weighted") == "class_weight" and given("input") in ("generator", "torch", "grain"):
        return False  # for inputs that Keras can map or slice
    if not arrays and given("shuffle"):
        return False  # the input's own order
    if given("model") == "tables" and not _tables_are_legal(choices):
        return False
    if given("blocks") == "scanned" and given("model") != "blocks":
        return False  # there are none
    if given("input") == "grain" and given("validation") != "none" and _ends_with_an_epoch(choices):
        return False  # Keras fails in the next epoch, whose first step never comes
    # Every operation is compiled alone, for minutes.
    large = ("masked", "images", "recurrent", "augmented", "strided", "deep", "tables", *BY_TOKEN)
    return not (given("run_eagerly") and given("model") in large)


def _tables_are_legal(choices: dict[str, Any]) -> bool:
    given = choices.get
    if given("mesh") in ("2x2t2", "t2x4") or given("processes") == 2:
        return False
    if given("reduction") == "sum":
        return False  # at these rates it ends in infinity
    if given("of") == "tied" and given("weighted") == "class_weight":
        return False  # one class for a row is needed
    if given("use") == "lazy":
        still = given("updates") in (None, *ROW_WISE) and given("limit") in (None, "clipvalue")
        if not still or given("of") in ("tied", "regularized", "constrained", "penalized"):
            return False
    return given("updates") != "adamw" or given("limit") != "decay"  # it has one


def _differs(choices: dict[str, Any]) -> bool:
    """Whether the same program in one thread of one process gives something else, or nothing."""
    given = choices.get
    beside = given("beside", "nothing")
    if given("processes") == 2 and beside != "nothing":
        return True  # a model runs in one thread at a time there
    if beside != "nothing" and given("where") == "moved":
        return True  # until fit has moved it, it is a model of stock Keras in another thread
    if beside == "fit" and given("shuffle"):
        return True  # both draw from one generator
    # Averages become weights at a fit's end, which does not come after a callback compiled.
    averaged = given("optimizer") in ("averaged", "averaged_at_end")
    if given("callbacks") == "compiles" and (beside != "nothing" or averaged):
        return True
    return given("model") in ("assigned", "split", "assigned_pair") and given("mesh") in (
        *("8", "t2x4"),  # one logical device, or no axis "model"
    )


def _ends_with_an_epoch(choices: dict[str, Any]) -> bool:
    rows, size, steps = (choices.get(n) for n in ("rows", "batch_size", "steps_per_epoch"))
    return None not in (rows, size, steps) and -(-rows // size) == steps


def drawn(seed: int, fixed: Iterable[tuple[str, Any]] = ()) -> Program:
    """A program, the same for each seed."""
    rng = random.Random(seed)
    fixed = dict(fixed)
    # Trainer and model come first, for those that allow little else are as frequent as others.
    first = {name: rng.choice(OPTIONS[name]) for name in ("trainer", "model")} | fixed
    for attempt in range(1000):
        given = first if attempt < 200 else fixed
        choices = {name: given.get(name, rng.choice(values)) for name, values in OPTIONS.items()}
        loop = _LOOPS.get(choices["trainer"], {})
        choices |= {name: value for name, value in loop.items() if name not in fixed}
        details = DETAILS.get(choices["model"], {})
        choices |= {name: given.get(name, rng.choice(each)) for name, each in details.items()}
        if is_legal(choices):
            return Program(seed, choices)
    raise ValueError(f"no legal program has {fixed}")


def pairs_of(program: Program) -> set[Pair]:
    """The pairs of options that meet in a program."""
    choices = [(name, program.choices[name]) for name in sorted(OPTIONS)]
    return set(itertools.combinations(choices, 2))


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
    """The programs, and more until every pair of options has met."""
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
