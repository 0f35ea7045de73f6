"""Puts faults back, one by one, and says whether the laws find each.

    python tests/laws/mutants.py [name ...]

A mutant is a change of one place in a copy of the package that makes the mistake again which a
law once found. It is found if one of its cases does not hold any more.
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "conformance"), str(TESTS)]

from laws import run  # noqa: E402

PACKAGE = TESTS.parent / "keras_tpu_dist"


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the cases that should find it.

    Attributes:
        file: The file in the package.
        old: The text there now.
        new: The text that makes the mistake.
        cases: A pattern of cases.
    """

    file: str
    old: str
    new: str
    cases: str


MUTANTS = {
    "flags are paired by position": Mutant(
        "layers/convert.py",
        "    for before, after in pairs.variables:\n",
        "    for before, after in zip(model.variables, clone.variables):\n",
        r"^layers/GRU/stateful \| converted then resumed .* frozen|^layers/GRU/stateful \| nothing",
    ),
    "an optimizer is built in the trace": Mutant(
        "replica/hooks.py",
        "with _outside(optimizer), keras.name_scope(",
        "with keras.name_scope(",
        r"^optimizers/ScheduleFreeAdamW/plain \| .*replica_code then replica_code",
    ),
    "slots begin before weights are loaded": Mutant(
        "checkpoint/slots.py",
        '    optimizer: Any = getattr(model, "optimizer", None)\n    ids =',
        "    return\n    ids =",
        r"^optimizers/ScheduleFreeAdamW/plain \| (fine_tuned|restored_from)",
    ),
    "the last of several optimizers is taken for all": Mutant(
        "checkpoint/optimizers.py",
        "    by_weights = _one_to_one(trained)\n",
        "    return dict.fromkeys(here, list(saved)[-1])\n    by_weights = _one_to_one(trained)\n",
        r"^interrupted optimizers/MultiOptimizer/plain",
    ),
    "states of callbacks meet JSON in the writer": Mutant(
        "callbacks/states.py",
        'state["state"] = marked(callback.state_dict(), arrays)',
        'state["state"] = callback.state_dict()',
        r"^interrupted .* \| state of a user \| cut at \(4, 3\)",
    ),
    "methods are replaced by attribute": Mutant(
        "_keras/seam.py",
        "    elif isinstance(holder, type) and _is_function(vars(holder).get(replacement.name)):\n",
        "    elif False:\n",
        r"^wrapped ",
    ),
    "callbacks are told apart by their order": Mutant(
        "callbacks/identity.py",
        "    return Identity(type(callback).__name__, monitor if is_name else None, config)\n",
        "    return Identity(type(callback).__name__)\n",
        r"^interrupted .*/two \| .* \| turned",
    ),
    "a converted model has other paths": Mutant(
        "layers/convert.py",
        "    _keras.repeat_names(pairs)\n",
        "",
        r"^optimizers/MultiOptimizer/whole_path \| (nothing then )?converted",
    ),
    "a scan casts back to the dtypes that it began with": Mutant(
        "training/step.py",
        "            check_types(state, new_state)\n            return new_state, outputs\n",
        "            same = jax.tree.map(lambda n, o: n.astype(o.dtype), new_state, state)\n"
        "            return same, outputs\n",
        r"^dtypes/(float32/int32|mixed_float16/float16) \| .*launches",
    ),
    "composed names are taken for the user's": Mutant(
        "checkpoint/names.py",
        'canonical(name.removeprefix(prefixes.get(id(item), "")))',
        "canonical(name)",
        r"^layers/Bidirectional/concat \| nothing then (resumed|restored) ",
    ),
    "values that are arrays are dropped": Mutant(
        "callbacks/states.py",
        "        for name in _keras.changing(callback, _keras.CHANGING)\n    }\n"
        '    state["attributes"]',
        "        for name in _keras.changing(callback, _keras.CHANGING)\n"
        "        if isinstance(getattr(callback, name), (int, float, type(None)))\n    }\n"
        '    state["attributes"]',
        r"^interrupted .* \| values of (JAX|NumPy) \| cut at \(4, 3\)",
    ),
    "what a callback of Keras counts is not saved": Mutant(
        "_keras/callback_states.py",
        '"ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),',
        '"ModelCheckpoint": ("best",),',
        r"^interrupted .*ModelCheckpoint/batches",
    ),
    "a checkpoint narrows to the dtype of a first value": Mutant(
        "checkpoint/restore.py",
        "v.value.sharding, dtype_of(v))",
        "v.value.sharding, v.value.dtype)",
        r"^dtypes/float32/(bfloat16|int32) \| .*resumed",
    ),
    "paths have the names of models": Mutant(
        "checkpoint/restore.py",
        "models=models,",
        "models=(),",
        r"^optimizers/\w+/\w+ \| (pickled|copied|saved_as_keras|cloned) then re(sumed|stored) ",
    ),
}


def found(mutant: Mutant, most: int = 8) -> str:
    """What a law says of a mutant; empty if all of its cases hold."""
    jobs = run.listed(mutant.cases, drawn=6)[:most]
    assert jobs, f"no case matches {mutant.cases}"
    with tempfile.TemporaryDirectory() as folder:
        for part in (PACKAGE, TESTS):
            shutil.copytree(part, Path(folder) / part.name)
        path = Path(folder) / PACKAGE.name / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} not once"
        path.write_text(text.replace(mutant.old, mutant.new))
        findings = run.run_all(jobs, processes=1, worker=Path(folder) / "tests/laws/worker.py")
    wrong = [finding for finding in findings if finding.outcome != "right"]
    return f"{len(wrong)} of {len(findings)}: {str(wrong[0])[:200]}" if wrong else ""


def main() -> int:
    """Prints what the laws say of each mutant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="those whose names have one of these words")
    arguments = parser.parse_args()
    run.begin()
    missed = 0
    for name, mutant in MUTANTS.items():
        if not arguments.names or any(words in name for words in arguments.names):
            words = found(mutant)
            missed += not words
            print(f"{'found' if words else 'MISSED'} {name} | {words}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
