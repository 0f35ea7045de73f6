"""Everything that reads what somebody else may have written, fed with what nobody would write.

Each reader gives a value or raises an error of this package, within 5 seconds and within 64 MiB of
Python's and NumPy's memory; the process may not grow by more than 4 GiB.

KTD_TEXTS=20000 KTD_SEED=1 pytest -n 0 tests/test_readers.py -k odd_texts
"""

import contextlib
import copy
import json
import pathlib
import re
import resource
import signal
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import keras
from hypothesis import strategies as st

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks.states import give_back, give_back_history
from keras_tpu_dist.checkpoint import manifest as manifests
from keras_tpu_dist.checkpoint.contents import CheckpointRow, _cells
from keras_tpu_dist.input.position import (
    own_position,
    random_numbers,
    set_random_numbers,
)
from keras_tpu_dist.tools.shell import given as shell

SECONDS, BYTES, GROWTH = 5, 64 * 2**20, 4 * 2**30
IN_OUR_FORM = re.compile(r"\. Received: .+\. .+", re.DOTALL)


@dataclass(frozen=True)
class Reader:
    """Reads texts, given whole ones; parts of JSON are put in the place of others."""

    read: Callable[[str], Any]
    whole: Callable[[], list[str]]
    as_json: bool = False


# --- what is read --------------------------------------------------------------------------------


def of_training() -> dict[str, Any]:
    position = {"start": random_numbers(), "now": random_numbers(), "made": 3, "done": 1}
    return {
        **{"epoch": 1, "done": 1, "step": 9, "stopped": False, "reached": None},
        **{"global_seed": [0, 3], "positions": [{**position, "state": {"json": "[1]"}}, None]},
        "callbacks": [{"class": "EarlyStopping", "attributes": {"wait": 1, "best": 0.5}}],
        "history": {"epoch": [0], "logs": {"loss": [0.5]}},
    }


def a_manifest() -> str:
    row = {"path": "dense/kernel", "shape": [4, 1], "dtype": "float32", "slot": "", "nth": 0}
    row |= {"key": "weights_00000", "fingerprint": 1, "axes": [["data", "model"], None]}
    written = {"at": "now", "mesh": {"data": 8}, "processes": 1, "keras_tpu_dist": "0.2.0"}
    arrays = {"weights": [row], "slots": [], "extra": []}
    return json.dumps(
        {"version": 1, "written": written, "training": of_training(), "arrays": arrays}
    )


def read_manifest(text: str) -> None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return  # as Orbax's are, these are made CheckpointErrors where they are read
    if isinstance(data, dict):
        with contextlib.suppress(RecursionError):
            data["crc32"] = manifests._crc32({k: v for k, v in data.items() if k != "crc32"})
    found = manifests.from_json(data, "Checkpoint 1")
    if found.lacks(manifests.OF_FIT):
        return
    # What is read is used, as far as no directory is needed.
    before, training = random_numbers(), found.training
    _cells(CheckpointRow(1, written=tuple(found.written.items())))
    try:
        place = own_position(training["positions"])
        if place is not None:
            set_random_numbers(place.now)
    finally:
        set_random_numbers(before)
    stopping, history = keras.callbacks.EarlyStopping("loss"), keras.callbacks.History()
    history.on_train_begin()
    monitor = stopping.monitor
    give_back([stopping], training["callbacks"], {})
    give_back_history(history, training["history"])
    assert stopping.monitor == monitor
    assert isinstance(stopping.wait, (int, float))


def read_rules(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python's, of sets within sets
        rules = ktd.LayoutRules.from_json(text)
        rules.match("model/dense/kernel")
        assert ktd.LayoutRules.from_json(rules.to_json()) == rules


def a_layer() -> str:
    layer = ktd.remat(keras.layers.Dense(4, name="dense"), "full")
    return json.dumps(keras.saving.serialize_keras_object(layer)["keras_tpu_dist"])


def read_marks(text: str) -> None:
    config = keras.saving.serialize_keras_object(keras.layers.Dense(4, name="dense"))
    with contextlib.suppress(ValueError, RecursionError):
        config["keras_tpu_dist"] = json.loads(text)
    layer = keras.saving.deserialize_keras_object(config)
    assert layer.units == 4
    keras.layers.Dense.from_config({**layer.get_config()})


def read_mesh(text: str) -> None:
    sizes = shell.mesh_of(text)
    for read in (shell._array, shell.remat_of):
        with in_our_form():
            read(text)
    ktd.TPUStrategy(sizes)


def texts(*found: str) -> Callable[[], list[str]]:
    return lambda: list(found)


RULES = '[["(?i)dense/kernel", [null, "model"]], ["kernel", [["data", "model"], null]]]'
READERS = {
    "manifest": Reader(read_manifest, lambda: [a_manifest()], as_json=True),
    "rules": Reader(read_rules, texts(RULES), as_json=True),
    "marks": Reader(read_marks, lambda: [a_layer()], as_json=True),
    "topology": Reader(ktd.Topology.parse, texts("v5e:4x4", "4*v5p:8x8x8", "v5litepod-16")),
    "mesh": Reader(read_mesh, texts("data=8", "data=-1,model=2", "int32:3,4", "block_*=dots")),
}

# --- what nobody would write ---------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(10**40), 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", " ", "x", "x" * 10**4, "\u202e\u00e9\u4e00\x00", "9" * 5000),
    *(
        "(",
        "(a+)+$",
        "a{99999999999}",
        "../../etc/passwd",
        "/dev/zero",
        "__class__",
        "\u00b2",
        "1_0",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        [0] * 1000,
        {"__class__": {"__init__": 1}},
        "data",
        "object",
    ),
]


def deep(depth: int, shut: bool) -> str:
    return "[" * depth + ("]" * depth if shut else "")


ODD_TEXT = [
    *(json.dumps(each) for each in ODD),
    *(deep(50, True), deep(5000, True), deep(5000, False), '{"a":' * 3000),
    *("{", "}", "(", ")", ",", "=", "\n", "%", "ROOT ", "-", "99999999999", "x", "*", ":"),
]


@st.composite
def changed_json(draw, whole: str) -> str:
    """JSON of which some parts are others."""
    data = json.loads(whole)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(places(data))))
        what = draw(st.sampled_from(("put", "put", "put", "drop", "twice")))
        if holder is None:
            data = copy.deepcopy(draw(st.sampled_from(ODD)))
            break
        if what == "put":
            # A copy, as later changes go into it.
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD) | small))
        elif what == "drop":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[f"{key}2"] = holder[key]
    return json.dumps(data)


small = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(data: Any):
    """Every place of plain data, as what holds it and its key there."""
    yield None, None
    todo = [data]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])


@st.composite
def changed_text(draw, whole: str) -> str:
    """A text of which some parts are left out, come twice, or are others."""
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
        what = draw(st.sampled_from(("put", "number", "name", "drop", "twice", "shift")))
        if what == "put":
            whole = whole[:a] + draw(st.sampled_from(ODD_TEXT) | st.text(max_size=8)) + whole[a:]
        elif what in ("number", "name"):
            # One number, or one name, in the place of another.
            found = list(re.finditer(r"\d+" if what == "number" else r"%?[a-z][\w.\-]+", whole))
            if found:
                one, other = draw(st.sampled_from(found)), draw(st.sampled_from(found))
                odd = draw(st.sampled_from((other[0], "0", "-1", "9" * 12, "9" * 5000, "")))
                whole = whole[: one.start()] + odd + whole[one.end() :]
        elif what == "drop":
            whole = whole[:a] + whole[b:]
        elif what == "twice":
            whole = whole[:b] + whole[a:]
        else:
            lines = whole.splitlines(keepends=True)
            lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(lines or [""])))
            whole = "".join(lines)
        whole = whole[: 2**20]
    return whole


def odd_texts(reader: Reader) -> st.SearchStrategy[str]:
    """Random text, and what the reader reads with parts of it changed."""
    whole = st.sampled_from(reader.whole())
    kinds = [st.text(), st.sampled_from(ODD_TEXT), whole.flatmap(changed_text)]
    if reader.as_json:
        kinds += [whole.flatmap(changed_json)] * 3
    return st.one_of(kinds)


# --- what it may do ------------------------------------------------------------------------------


@contextlib.contextmanager
def in_our_form():
    """Lets errors of ours pass, and no other."""
    try:
        yield
    except (ValueError, ktd.CheckpointError) as error:
        if not IN_OUR_FORM.search(str(error)):
            raise AssertionError(f"{type(error).__name__}: {str(error)[:500]}") from error


@contextlib.contextmanager
def bounded():
    """Within so much time and memory."""

    def late(number, frame):
        raise AssertionError(f"it took more than {SECONDS} seconds")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak <= BYTES, f"it took {peak / 2**20:.0f} MiB"
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def read_one(name: str, text: str) -> None:
    """Has a reader read a text; an `AssertionError` says what it may not do."""
    with bounded(), in_our_form():
        READERS[name].read(text)


def fuzz(name: str, examples: int, seed: int | None = None) -> None:
    """Feeds a reader."""
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(odd_texts(READERS[name]))
    def run(text):
        read_one(name, text)

    (run if seed is None else hypothesis.seed(seed)(run))()
