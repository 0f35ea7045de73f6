"""Packages and what they may import: imports run one way, private names stand in one package."""

import ast
import functools
import pathlib
import re

import pytest
from helpers import of_docs

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras

architecture, figures = of_docs("architecture"), of_docs("figures")
ROOT = pathlib.Path(ktd.__file__).parent
# Each package, or module beside the packages, and those whose names it may import.
BASE = {"common", "_keras"}
PACKAGES = {
    "common": set(),
    "_keras": {"common"},
    "hardware": BASE,
    "show": {"common", "hardware"},
    # Traced programs: how they are read, and what is computed otherwise.
    "programs": BASE,
    "programs.partitioner": {"common", "programs"},
    "programs.generation": {"programs"},
    "programs.scan": {*BASE, "programs", "programs.partitioner"},
    "programs.sums": {*BASE, "programs", "programs.partitioner", "show"},
    "programs.between": {*BASE, "programs", "programs.partitioner"},
    "programs.experts": {*BASE, "programs", "programs.partitioner"},
    "programs.tables": {*BASE, "programs", "programs.partitioner"},
    "programs.head": {*BASE, "programs", "programs.partitioner"},
    "programs.passes": {
        "_keras",
        "programs",
        "programs.between",
        "programs.experts",
        "programs.generation",
        "programs.head",
        "programs.partitioner",
        "programs.sums",
        "programs.tables",
    },
    # What trains.
    "recurrence": {"common"},
    "memory": {*BASE, "programs", "programs.partitioner", "programs.scan"},
    "attention": {*BASE, "hardware", "memory", "programs.partitioner"},
    "layout": {
        *BASE,
        "hardware",
        "programs",
        "programs.between",
        "programs.partitioner",
        "show",
    },
    "logical": {*BASE, "hardware", "layout", "programs.partitioner"},
    "layers": {
        *BASE,
        "hardware",
        "layout",
        "programs",
        "programs.experts",
        "programs.partitioner",
        "programs.passes",
        "recurrence",
    },
    "processes": BASE,
    "input": {*BASE, "hardware", "processes"},
    "training": {
        "show",
        *BASE,
        "hardware",
        "input",
        "layout",
        "memory",
        "processes",
        "programs",
        "programs.experts",
        "programs.partitioner",
        "programs.passes",
        "programs.sums",
    },
    "checkpoint": {*BASE, "input", "layers", "processes", "show", "training"},
    "replica": {*BASE, "input", "processes", "programs", "programs.partitioner", "training"},
    "callbacks": {
        *BASE,
        "checkpoint",
        "hardware",
        "input",
        "processes",
        "show",
        "tools.dryrun",
        "training",
    },
    # Tools, which read and report.
    "tools": set(),
    "tools.hlo": {"common", "hardware", "programs"},
    "tools.launcher": {"common", "hardware"},
    "tools.dryrun": {
        *BASE,
        "hardware",
        "input",
        "layout",
        "memory",
        "programs",
        "programs.head",
        "programs.partitioner",
        "show",
        "tools.hlo",
        "training",
    },
}
PACKAGES["tools.checkup"] = {
    *PACKAGES["tools.dryrun"],
    "layers",
    "processes",
    "tools.dryrun",
}
PACKAGES["tools.replay"] = {*PACKAGES["tools.checkup"], "tools.checkup"}
PACKAGES["strategy"] = {*PACKAGES} - {
    "recurrence",
    "layers",
    "callbacks",
    "checkpoint",
}
PACKAGES["tools.searches"] = {
    *PACKAGES["tools.dryrun"],
    "layers",
    "programs.tables",
    "strategy",
    "tools.dryrun",
}
PACKAGES["tools.shell"] = {*PACKAGES}
PACKAGES["__main__"] = {"tools.shell"}
MOST_LINES_OF_A_FUNCTION = 60


@functools.cache
def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def package_of(path):
    return architecture.package_named(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_run_one_way():
    found = architecture.imports()
    assert set(found) == set(PACKAGES)
    assert {
        name: found[name] - PACKAGES[name] for name in found if found[name] - PACKAGES[name]
    } == {}


def test_the_table_has_no_circle():
    architecture.levels({name: knows - {name} for name, knows in PACKAGES.items()})


def own_names(sources, of_self=False):
    """What modules define, and write on objects; on any, or on `self` alone."""
    names = set()
    for node in (node for tree in sources for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if not of_self or ast.unparse(node.value) == "self" else set()
    return names


def private_names(tree):
    """Private attributes that are read, and strings that may name one: `(line, name)`."""
    skipped = {id(each) for node in ast.walk(tree) for each in _not_names(node)}
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            name = node.value if isinstance(node.value, str) else None
        if name and re.fullmatch(r"_[A-Za-z]\w*", name):
            yield node.lineno, name


def _not_names(node):
    """Strings that are parts of others, and what a replacement of the seam declares."""
    if isinstance(node, ast.JoinedStr):
        yield from node.values
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Replacement"):
        yield from (each for argument in node.args for each in ast.walk(argument))


# The folder of the seam; names of Python, of named tuples and of `os`; ends of names of our own;
# marks that we put on objects.
PYTHONS = {"_keras", "_replace", "_fields", "_asdict", "_exit", "_current_frames"}
ENDS = {"_a", "_b", "_zero", "_of_"}
OURS = "_keras_tpu_dist_"


def test_private_names_of_keras_and_jax_stand_in_one_package():
    own = own_names(trees().values()) | PYTHONS | ENDS
    for path, tree in trees().items():
        if package_of(path) == "_keras":
            continue
        text = path.read_text()
        assert "jax._src" not in text, path
        assert "from keras.src" not in text, path
        assert "import keras.src" not in text, path
        found = [
            (line, name)
            for line, name in private_names(tree)
            if name not in own and not name.startswith(OURS)
        ]
        assert not found, f"{path}: {found}"


def seam_trees():
    return [t for p, t in trees().items() if package_of(p) == "_keras" and p.name != "names.py"]


def reached(tree):
    """Names of Keras and JAX that a module of the seam reaches: `(line, name)`."""
    yield from private_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(
            r"keras\.src|jax\._src", node.module or ""
        ):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.match(r"keras\.src", ast.unparse(node)):
            yield node.lineno, node.attr


def undeclared(sources):
    """Names that the seam reaches and neither table has."""
    declared = {each.name for each in _keras.names()} | {each.name for each in _keras.table()}
    # Modules of which names are imported are declared with them.
    declared |= {part for e in _keras.names() for part in e.owner.partition(":")[0].split(".")}
    known = declared | own_names(sources, of_self=True)
    found = [(line, name) for tree in sources for line, name in reached(tree)]
    return [each for each in found if each[1] not in known and not each[1].startswith(OURS)]


def test_what_the_seam_reaches_is_declared():
    assert undeclared(seam_trees()) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(model): return model._tracker", "_tracker"),
        ("def f(model): model._tracker = 1", "_tracker"),
        ("NAME = '_tracker'", "_tracker"),
        ("def f(model): return getattr(model, '_tracker', None)", "_tracker"),
        ("from keras.src.utils import torch_utils", "torch_utils"),
        ("from jax._src import mesh", "mesh"),
        ("def f(): return keras.src.backend.standardize_dtype", "standardize_dtype"),
    ],
)
def test_what_the_seam_reaches_undeclared_is_found(source, name):
    assert name in [each for _, each in undeclared([*seam_trees(), ast.parse(source)])]


def test_what_is_declared_is_reached():
    used = {name for tree in seam_trees() for _, name in reached(tree)}
    used |= {n.value for t in seam_trees() for n in ast.walk(t) if isinstance(n, ast.Constant)}
    used |= {n.attr for t in seam_trees() for n in ast.walk(t) if isinstance(n, ast.Attribute)}
    of_calls = {k.arg for t in seam_trees() for k in ast.walk(t) if isinstance(k, ast.keyword)}
    rest = {each.name for each in _keras.names()} - used - of_calls
    # The weight of this name is put together from its public one.
    assert rest == {"_kernel"}


def functions():
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                words = first.end_lineno - first.lineno + 1 if text else 0
                yield f"{path}:{node.name}", node.end_lineno - node.lineno + 1 - words


def test_functions_are_short():
    lengths = dict(functions())
    assert {f: n for f, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


def test_no_literal_is_unpacked():
    found = {path: figures.splats(tree) for path, tree in trees().items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("f(*(a, b), c)", 1),
        ("(*[a, b], *{c})", 2),
        ("f(**{'a': 1})", 1),
        ("{**{'a': 1}, 'b': 2}", 1),
        ("f(*a, **b)", 0),
        ("(*a, *(x for x in b), *map(f, c))", 0),
        ("{**a, **dict.fromkeys(b)}", 0),
        ("f(**a | {'b': 1})", 0),
    ],
)
def test_the_search_for_unpacked_literals_finds_them(source, found):
    assert len(figures.splats(ast.parse(source))) == found


# Keras's layers, and the arithmetic of their steps without Keras.
TWICE = {"LSTM", "GRU", "SimpleRNN"}


def test_no_two_classes_have_one_name():
    classes = [
        (node.name, package_of(path))
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    names = [name for name, _ in classes]
    assert {each for each in classes if names.count(each[0]) > 1 and each[0] not in TWICE} == set()


# Methods that Keras calls: their arguments are described there.
KERAS_CALLS = {
    "build",
    "call",
    "compute_mask",
    "compute_output_shape",
    "compute_output_spec",
    "from_config",
    "get_initial_state",
    "set_model",
    "set_params",
}


def public_names():
    """What the pages of the reference describe, and what the package exports."""
    pages = (ROOT.parent / "docs" / "reference").glob("*.md")
    found = re.findall(r"^::: keras_tpu_dist[\w.]*\.(\w+)$", "\n".join(map(_text, pages)), re.M)
    return {*found, *ktd.__all__}


def _text(page):
    return page.read_text()


def undocumented(path, body, prefix=""):
    """Functions with parameters whose docstring names none of them."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from undocumented(path, node.body, f"{node.name}.")
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        of_keras = node.name in KERAS_CALLS or node.name.startswith("on_")
        setter = any(isinstance(d, ast.Attribute) for d in node.decorator_list)
        parameters = [*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        named = [a.arg for a in parameters if a is not None and a.arg not in ("self", "cls")]
        words = ast.get_docstring(node) or ""
        if named and not of_keras and not setter and not ("Args:" in words or "See `" in words):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {prefix}{node.name}({', '.join(named)})"


def test_public_functions_describe_their_arguments():
    """Those that users read; within the package a name and a type may be enough."""
    public = public_names()
    assert "TPUStrategy" in public
    assert "Explanation" in public
    found = [
        line
        for path, tree in trees().items()
        if package_of(path) != "recurrence"  # its cells are named like layers: see TWICE
        for line in undocumented(path, [n for n in tree.body if getattr(n, "name", "") in public])
    ]
    assert not found, "\n".join(["without Args:", *found])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("layer._flatten_layers()", [(1, "_flatten_layers")]),
        ("getattr(model, '_functional', None)", [(1, "_functional")]),
        ("NAMES = ('_functional',)", [(1, "_functional")]),
        ("layer.name", []),
    ],
)
def test_the_search_for_private_names_finds_them(source, found):
    assert list(private_names(ast.parse(source))) == found


def test_every_mesh_has_types_of_axes():
    """The default of `Mesh` may one day be that of `jax.make_mesh`, whose axes are Explicit."""
    made = [
        (str(path.relative_to(ROOT)), call)
        for path, tree in trees().items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and re.search(r"(^|\.)Mesh$", ast.unparse(call.func))
    ]
    assert made
    assert not [p for p, c in made if "axis_types" not in [k.arg for k in c.keywords]]
