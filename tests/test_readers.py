"""No reader does what a stranger's file says, and none raises but in our form: see readers.py."""

import ast
import functools
import os
import pathlib

import pytest
from readers import READERS, fuzz, read_one

import keras_tpu_dist as ktd

ROOT = pathlib.Path(ktd.__file__).parent
# What `tests/readers.py` found.
SEEDS = {
    "manifest": [],
    "rules": ["[" * 10**5, "9" * 5000, '[["a{99999999999}", []]]', "null", '[["a", [3]]]'],
    "marks": [
        '{"_keras_tpu_dist_annotation": {"output": 3}}',
        '{"_keras_tpu_dist_remat": 3}',
        '{"unknown": 3}',
        "[1]",
        '"full"',
    ],
    "topology": ["9" * 5000 + "*v5e:4x4", "v5e:" + "9" * 5000, "x" * 10**6, "99999999*v5e:4x4"],
    "mesh": ["data=" + "9" * 5000, "data=4,data=2", "=8", "data=\u00b2", "float32:99999999999999"],
}


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, found in SEEDS.items() for t in found])
def test_what_was_found_once(name, text):
    read_one(name, text)


TEXTS, SEED = os.environ.get("KTD_TEXTS"), os.environ.get("KTD_SEED")


@pytest.mark.parametrize("name", READERS)
def test_odd_texts(name):
    fuzz(name, int(TEXTS or 60), None if SEED is None else int(SEED))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_more_odd_texts(name):
    fuzz(name, 1000)


# Calls that make bytes into code or objects, and where they may stand: with why.
AS_CODE = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "marshal.load"}
AS_CODE |= {"eval", "exec", "compile", "np.load", "numpy.load", "joblib.load", "torch.load"}
AS_CODE |= {"yaml.load", "dill.loads", "cloudpickle.loads", "shelve.open"}
MAY_BE_CODE = {
    # Its job and its result, in a folder that this process has just made for itself alone.
    ("tools/dryrun/worker.py", "pickle.load"),
    ("tools/dryrun/worker.py", "pickle.loads"),
    ("tools/dryrun/compile.py", "pickle.loads"),
}
# Attributes by a name that is no word of the source, and where that comes from.
MAY_SET = {
    ("callbacks/states.py", "setattr(callback, name, saved[name])"): "CHANGING, in the source",
    ("callbacks/states.py", "setattr(callback, name, values)"): "ARRAYS, in the source",
    ("layers/convert.py", "setattr(clone, name, copier.of(value))"): "the model's own attributes",
    ("_keras/building.py", "setattr(model, name, value)"): "two words in the source",
    ("_keras/building.py", "setattr(keras.Variable, name, chosen)"): "a class's own names",
    ("_keras/building.py", "delattr(keras.Variable, name)"): "a class's own names",
    ("_keras/building.py", "setattr(keras.Variable, name, own)"): "a class's own names",
    (
        "_keras/calls.py",
        "setattr(kind, method_name, _routed(stock, method_name, {**wrappers, place: around}))",
    ): "a word of the caller",
    ("_keras/trainer.py", "setattr(model, f'{kind}_function', None)"): "one of GROUPS",
    ("_keras/marks.py", "object.__setattr__(target, self.attribute, value)"): "the mark's own",
    ("_keras/configs.py", "setattr(owner, name, _calling(stock, by))"): "_REPLACED, in the source",
    ("_keras/configs.py", "setattr(owner, name, stock)"): "_REPLACED, in the source",
    (
        "_keras/seam.py",
        "setattr(holder, replacement.name, replacement.by)",
    ): "the table in the source",
    (
        "_keras/seam.py",
        "setattr(holder, replacement.name, _calling(stock, replacement.by))",
    ): "the table in the source",
    (
        "_keras/active.py",
        "setattr(global_state.GLOBAL_STATE_TRACKER, name, value)",
    ): "Keras's own attributes, set as Keras does",
    (
        "layers/beside.py",
        "setattr(layer, name, np.asarray(saved[_OTHERS + name], _ATTRIBUTES[name]).tolist())",
    ): "_ATTRIBUTES, in the source",
    ("processes/agreement.py", "setattr(callback, name, path)"): "_FILES, in the source",
}


@functools.cache
def calls():
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    return [
        (path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_that_is_read_becomes_code():
    found = {(where, name) for where, name, _ in calls() if name in AS_CODE}
    assert found == MAY_BE_CODE


def test_no_attribute_is_set_by_a_name_from_a_file():
    sets = ("setattr", "delattr", "object.__setattr__")
    by_name = {
        (where, ast.unparse(node))
        for where, name, node in calls()
        if name in sets
        and not isinstance(node.args[1], ast.Constant)
        # A constant of the module, `names[0]` of a list in it, or a word with another in it.
        and not ast.unparse(node.args[1]).isupper()
        and ast.unparse(node.args[1]) not in ("names[0]", "attribute")
    }
    assert by_name == set(MAY_SET)
