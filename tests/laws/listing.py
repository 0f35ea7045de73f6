"""Which cases there are: every act on every subject, every row of callbacks, and drawn ones."""

import itertools
import random
from collections.abc import Iterator

import keras

from .acts import ACTS
from .cases import FROZEN, STRATEGIES, TRAINERS, Case
from .catalogue import SLOW_LAYERS, Subject, subjects
from .interrupted import CALLBACKS, Interrupted

_PAIRS = (("8", "4x2"), ("4x2", "8"), ("2x2x2", "8"), ("8", "fsdp"), ("remat", "2x2x2"))
# What every subject meets. A layer meets some of the other acts too, and each act some layers.
_FEW = ("nothing", "saved_as_keras", "converted", "resumed")
_SOME = (*_FEW, "compiled_again", "evaluated")
_OTHERS_EACH = 4
_OF_BATCHES = ("train_on_batch", "replica_code")


def all_cases(drawn_each: int = 1, seed: int = 0) -> list[Case | Interrupted]:
    """Every subject with every act, trainer and frozen layer; and `drawn_each` drawn cases."""
    found: dict[Case | Interrupted, None] = dict.fromkeys(_of_callbacks())
    found |= dict.fromkeys(drawn_callbacks(20 * drawn_each, seed))
    for subject in subjects().values():
        found |= dict.fromkeys(_cases_of(subject))
        found |= dict.fromkeys(drawn(subject, drawn_each, seed))
    return list(found)


def all_jobs(drawn_each: int = 1, seed: int = 0) -> list[dict]:
    """All cases as plain values, each with the world that it is tried in."""
    plain = [{**case.to_dict(), "world": ""} for case in all_cases(drawn_each, seed)]
    wrapped = [{**case.to_dict(), "world": "wrapped"} for case in _wrapped_cases()]
    return plain + [{**job, "name": f"wrapped {job['name']}"} for job in wrapped]


def _wrapped_cases() -> Iterator[Case | Interrupted]:
    """Where another library replaced `fit`, `evaluate` and `predict` before anything of ours."""
    subject = "optimizers/SGD/averaged"
    for name in ("nothing", "failed", "evaluated", "resumed", "moved"):
        for trainer in ("fit", "launches"):
            yield Case(subject, acts=("nothing", name), trainers=(trainer, trainer))
    for name in ("ours/HostMetrics", "ours/NameNaN", "ours/StopAtStep", "EarlyStopping"):
        yield Interrupted(subject, callbacks=(name,), steps=2)


def _cases_of(subject: Subject) -> Iterator[Case | Interrupted]:
    if subject.kind == "dtypes":
        yield from _of_dtypes(subject)
    elif subject.name.split("/")[1] in SLOW_LAYERS:
        yield Case(subject.name, acts=("nothing", "resumed"))
    elif subject.kind == "layers" and not _is_first(subject):
        return  # drawn alone
    elif is_quick(subject) or subject.kind in ("regularizers", "constraints", "initializers"):
        yield from _by_acts(subject, _FEW)
        yield Case(subject.name, trainers=("launches", "launches"), strategies=("4x2", "8"))
    elif subject.kind in ("metrics", "losses", "schedules"):
        yield from _by_acts(subject, _SOME)
        for trainer in ("launches", "train_on_batch"):
            yield Case(subject.name, trainers=(trainer, trainer), strategies=("4x2", "8"))
        yield Interrupted(subject.name, cuts=(2, 3))
    else:
        everything = subject.kind == "optimizers" or subject.converts
        yield from _by_acts(subject, tuple(ACTS) if everything else _FEW)
        yield from _by_acts(subject, _others(subject))
        yield from _by_trainers(subject)
        yield from _by_frozen(subject)
        yield Interrupted(subject.name, cuts=(4,), steps=2)


def _others(subject: Subject) -> tuple[str, ...]:
    """Some of the acts that not every subject meets, another choice for each."""
    others = [name for name in ACTS if name not in _FEW]
    return tuple(random.Random(subject.name).sample(others, _OTHERS_EACH))


def _by_acts(subject: Subject, names: tuple[str, ...]) -> Iterator[Case]:
    for number, act in enumerate(ACTS[name] for name in names):
        pair = _PAIRS[(number + len(subject.name)) % len(_PAIRS)]
        middle = act.fits(subject, "middle") and act.name != "nothing"
        if middle:
            yield Case(subject.name, acts=("nothing", act.name), strategies=pair)
        if act.fits(subject, "start") and not middle:
            yield Case(subject.name, acts=(act.name, "nothing"), strategies=pair)


def _by_trainers(subject: Subject) -> Iterator[Case]:
    trainers = _trainers(subject)[1:]
    if subject.kind == "layers":
        trainers = ["launches", random.Random(subject.name).choice(trainers[1:])]
    for trainer in trainers:
        yield Case(subject.name, trainers=(trainer, trainer), strategies=("4x2", "2x2x2"))


def _by_frozen(subject: Subject) -> Iterator[Case]:
    first = "converted" if ACTS["converted"].fits(subject, "start") else "nothing"
    for frozen in FROZEN[1:]:
        yield Case(
            subject.name,
            acts=(first, "resumed"),
            trainers=("launches", "fit"),
            frozen=frozen,
        )


def _of_dtypes(subject: Subject) -> Iterator[Case]:
    for trainer in ("launches", "train_on_batch"):
        for pair in (("one", "8"), ("8", "4x2"), ("2x2x2", "8")):
            yield Case(subject.name, trainers=(trainer, trainer), strategies=pair)


def _of_callbacks() -> Iterator[Interrupted]:
    for name, row in CALLBACKS.items():
        yield Interrupted(callbacks=(name,), cuts=(4, 3))
        yield Interrupted(callbacks=(name,), cuts=(7,), every_steps=0)
        yield Interrupted(callbacks=(name,), cuts=(8,), first=True, steps=2)
        if row.turns:
            yield Interrupted(callbacks=(name,), cuts=(8,), turned=True)
    for name in ("EarlyStopping/two", "values of JAX", "state of a user"):
        yield Interrupted(callbacks=(name,), elsewhere=True)
    for name in ("optimizers/MultiOptimizer/plain", "layers/Bidirectional/concat"):
        yield Interrupted(name, elsewhere=True)


def drawn_callbacks(count: int, seed: int) -> Iterator[Interrupted]:
    """Cases of two rows of callbacks."""
    dice = random.Random(seed)
    pairs = list(itertools.combinations(CALLBACKS, 2))
    for pair in dice.sample(pairs, min(count, len(pairs))):
        yield Interrupted(
            callbacks=pair,
            cuts=dice.choice([(4,), (5, 3), (8,)]),
            every_steps=dice.choice([0, 1, 2, 3]),  # the first cut comes after the first save
            first=dice.random() < 0.5,
            turned=dice.random() < 0.5 and all(CALLBACKS[name].turns for name in pair),
            steps=dice.choice([1, 2]),
        )


def drawn(subject: Subject, count: int, seed: int) -> Iterator[Case]:
    """Cases of two acts, two trainers and two strategies."""
    dice = random.Random(f"{seed} {subject.name}")
    places = ("start", "middle")
    for _ in range(0 if subject.name.split("/")[1] in SLOW_LAYERS else count):
        acts = [[a.name for a in ACTS.values() if a.fits(subject, place)] for place in places]
        first, second = (dice.choice(names) for names in acts)
        trainers = [dice.choice(_trainers(subject)) for _ in places]
        if ACTS[second].checkpoint and trainers[0] in _OF_BATCHES:
            trainers[0] = "fit"
        if second == "resumed" and trainers[1] in _OF_BATCHES:
            trainers[1] = "launches"
        one, other = dice.sample([name for name in STRATEGIES if name != "one"], 2)
        yield Case(
            subject.name,
            acts=(first, second),
            trainers=(trainers[0], trainers[1]),
            strategies=(one, other),
            frozen=dice.choice(FROZEN) if _may_freeze(subject) and dice.random() < 0.3 else "",
        )


def _trainers(subject: Subject) -> list[str]:
    allowed = [trainer for trainer in TRAINERS if trainer not in subject.without]
    if subject.kind not in ("optimizers", "schedules"):
        allowed.remove("replica_code")
    return allowed


def _is_first(subject: Subject) -> bool:
    """Whether it is the first variant of its class, or carries states."""
    start = subject.name.rpartition("/")[0] + "/"
    return subject.converts or subject.name == next(n for n in subjects() if n.startswith(start))


def is_quick(subject: Subject) -> bool:
    """Whether it is a layer that has neither weights nor random numbers."""
    if subject.kind != "layers" or subject.converts:
        return False
    layer = next(case for case in subject.model.args if hasattr(case, "build")).build()
    return type(layer).build is keras.layers.Layer.build and not hasattr(layer, "seed_generator")


def _may_freeze(subject: Subject) -> bool:
    return subject.kind in ("layers", "optimizers") and not is_quick(subject)
