"""The command `ktd`: help, answers and errors of each command, silence, Ctrl-C."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import keras
import pytest
from dryrun.made import made_comparison
from helpers import assert_close

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.checkup import method
from keras_tpu_dist.tools.checkup import run as checking
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.shell import light
from keras_tpu_dist.tools.shell.commands import COMMANDS, _write_whole
from keras_tpu_dist.tools.shell.main import main
from keras_tpu_dist.tools.shell.parser import parser_of

ROOT = pathlib.Path(ktd.__file__).parents[1]
# Starts the command as the script that pip installs does.
SCRIPT = "import sys; sys.argv[0] = 'ktd'; from keras_tpu_dist.tools.shell.main import main; "
MODEL = """
import keras, keras_tpu_dist as ktd
def build():
    layers = [keras.layers.Dense(256, name="up"), keras.layers.Dense(8, name="down")]
    model = keras.Sequential([keras.Input((64,)), *layers], name="mlp")
    model.compile("adam", "mse")
    return model
def sequence():
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model
def both():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    with strategy.scope():
        return build(), strategy
def other_devices():
    ktd.simulate(2)
def raises():
    raise RuntimeError("no labels")
def misses_a_key():
    return {}["labels"]
def fails_in_keras():
    return keras.layers.Dense(-1)
def ends():
    raise SystemExit
def of_a_width(width):
    return build()
def no_model():
    build()
"""
SLICE = ["--topology", "v5e:2x4"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file with functions that build models, in the folder that a command runs in."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return "model.py:build"


def started(*words, code=SCRIPT + "sys.exit(main())", as_module=False, columns=120, **options):
    """A process that runs the command, with none of the devices that tests simulate."""
    hidden = (
        "XLA_FLAGS",
        "PJRT_NPROC",
        "JAX_PLATFORMS",
        "TPU_LOG_DIR",
        "ALLOW_MULTIPLE_LIBTPU_LOAD",
    )
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    start = ["-m", "keras_tpu_dist"] if as_module else ["-P", "-c", code]
    command = [sys.executable, *start, *map(str, words)]
    return subprocess.Popen(command, env=env, **pipes, **options)


def ran(*words, **options):
    """Exit code, standard output and standard error of the command in a process of its own."""
    with started(*words, **options) as process:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, out, err


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["search", "--help"], ["serach"]])
@pytest.mark.parametrize("as_module", [False, True])
def test_words_alone_import_no_keras(words, as_module):
    if as_module:
        command = [sys.executable, "-X", "importtime", "-m", "keras_tpu_dist", *words]
    else:
        code = SCRIPT + "sys.exit(main())"
        command = [sys.executable, "-X", "importtime", "-c", code, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if words == ["serach"] else 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "keras_tpu_dist.tools.shell.parser" in imported
    assert not imported & {"jax", "keras", "numpy", "rich"}


@pytest.mark.slow
def test_in_the_shell_the_package_has_all_its_names():
    names = "print(sorted(n for n in dir(ktd) if not n.startswith('_')))"
    code = "import sys; sys.argv[0] = {!r}; import keras_tpu_dist as ktd; {}; " + names
    late = "assert 'jax' not in sys.modules; ktd.TPUStrategy; assert 'jax' in sys.modules"
    first = ran(code=code.format("ktd", late))
    second = ran(code=code.format("train.py", "assert 'jax' in sys.modules"))
    assert first[0] == 0, first[2]
    # Packages of the shell are loaded by the shell.
    assert first[1] == second[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name):
    commands = next(a for a in parser_of("ktd")._actions if a.dest == "command").choices
    assert list(commands) == list(COMMANDS)
    for action in commands[name]._actions:
        assert len(action.help or "") > 8, (name, action.dest)
    text = commands[name].format_help()
    assert text.startswith(f"usage: ktd {name}")


def test_a_program_says_its_own_name(monkeypatch, capsys):
    for program, name in (("/bin/ktd", "ktd"), ("/x/__main__.py", "python -m keras_tpu_dist")):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(SystemExit):
            main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"keras_tpu_dist {ktd.__version__} (Python ")
    assert f"keras {keras.__version__}" in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serach"], "Did you mean 'search'?"),
        (["topologies", "v5"], "Did you mean 'v5p'?"),
        (["check", "--batchsize", "3"], "Did you mean '--batch-size'?"),
    ],
)
def test_the_nearest_word_comes_first(words, hint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert f"error: {hint}" in capsys.readouterr().err


def test_no_command_is_answered_with_help(capsys):
    assert main([]) == 2
    assert "dry-run" in capsys.readouterr().err


def test_the_nearest_slice_comes_first(model, capsys):
    assert main(["dry-run", model, "--topology", "v5e:2x3", "--batch-size", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Did you mean 'v5e:2x")
    assert len(error) < 400
    assert main(["search", model, "--topology", "v5f-8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Did you mean 'v5")
    assert len(error) < 400


@pytest.mark.parametrize("options", [["--layout", "fsdp"], []])
@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("raises", "RuntimeError: no labels"),
        ("misses_a_key", "KeyError: 'labels'"),
        ("fails_in_keras", "ValueError: Received an invalid value for `units`"),
        ("ends", "SystemExit"),
    ],
)
def test_an_error_in_a_function_says_where(function, error, options, model, capsys):
    assert main(["explain", f"model.py:{function}", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(f", in {function}" in line for line in lines)
    assert any(line.startswith(f"error: {error}") for line in lines)
    assert not any("shell/main.py" in line or "keras/src" in line for line in lines)


def test_an_error_in_a_file_says_where(model, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("import keras\ndef build(:\n")
    (tmp_path / "misses.py").write_text("import keras, no_such_module\n")
    assert main(["explain", "wrong.py:build"]) == 2
    error = capsys.readouterr().err
    assert 'wrong.py", line 2' in error
    assert "error: SyntaxError: " in error
    assert main(["explain", "misses.py:build"]) == 2
    error = capsys.readouterr().err
    assert 'misses.py", line 1' in error
    assert "error: ModuleNotFoundError: No module named 'no_such_module'" in error


# Modules of Python, which Keras imports early, late or never, and of installed packages.
OF_PYTHON = ("random", "types", "code", "queue", "json")
INSTALLED = ("keras", "jax", "numpy", "rich", "h5py", "iniconfig")
SHADOW = """
import json, random, sys
import helpers
other = "{0} was imported in the place of another module"
assert sys.argv == [__file__] and __file__.endswith("models/{0}.py"), other
assert sys.modules["random"] is random and random.Random and json.loads
build = helpers.build
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "as_module"),
    [
        *((name, False) for name in ("random", "types", "code", "keras", "iniconfig")),
        ("random", True),
    ],
)
def test_a_file_named_like_another_module_hides_none(name, as_module, tmp_path):
    (tmp_path / "models").mkdir()
    for each in (*OF_PYTHON, *INSTALLED):
        (tmp_path / f"models/{each}.py").write_text(f"OURS = True\n{SHADOW.format(each)}")
        if not (as_module and each == "types"):  # `python -m` itself imports that one
            (tmp_path / f"{each}.py").write_text("raise AssertionError(__file__)")
    (tmp_path / "models/helpers.py").write_text(MODEL)
    words = ["explain", f"models/{name}.py:build", "--devices", "2", "--mesh", "data=2"]
    code, out, err = ran(*words, as_module=as_module, cwd=tmp_path)
    assert (code, out.partition("\n")[0], err) == (0, "mlp on 2 devices {'data': 2}", "")


def test_a_module_that_another_one_hides_is_named_by_its_file(model, tmp_path, capsys):
    (tmp_path / "json.py").write_text(MODEL)
    assert main(["explain", "json:build", "--mesh", "data=8"]) == 2
    assert "write json.py for the file in this folder" in capsys.readouterr().err
    assert main(["explain", "json.py:build", "--mesh", "data=8"]) == 0


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a folder src, one of whose files imports another one relatively."""
    folder = tmp_path / "src" / "of_a_shell_test" / "inner"
    folder.mkdir(parents=True)
    for made in (folder.parent, folder):
        (made / "__init__.py").write_text("")
    (folder.parent / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(
        "from of_a_shell_test import model\nfrom ..model import build as made\n"
        "def build():\n    assert made is model.build\n    return made()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "of_a_shell_test"
    for name in [name for name in sys.modules if name.startswith("of_a_shell_test")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "named", ["src/{}/inner/train.py:build", "{}.inner.train:build", "src/{}/model:build"]
)
def test_a_file_of_a_package(named, package, capsys):
    assert main(["explain", named.format(package), *SLICE]) == 0
    assert "mlp on 8 devices" in capsys.readouterr().out


def test_a_package_that_another_one_hides(package, tmp_path, capsys):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "keras" / "own.py").write_text(MODEL)
    assert main(["explain", "keras/own.py:build", *SLICE]) == 2
    err = capsys.readouterr().err
    assert "Python finds another 'keras' before the package of this file" in err
    assert "Give your package another name" in err


PARSES = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("files", nargs="*")
options = parser.parse_args()
import model
def build():
    assert parser.parse_args() == options
    assert (options.files, options.width, len(sys.argv)) == ([], 64, 1)
    assert sys.argv[0].endswith("script.py"), sys.argv
    return model.build()
"""


@pytest.mark.parametrize("named", ["script.py", "other_script"])
@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        ("explain", SLICE, 0),
        ("explain", ["--devices", "8", "--mesh", "data=8"], 0),
        ("convert", ["b.keras"], 1),
    ],
)
def test_a_file_that_parses_the_command_line_reads_none_of_ours(
    command, words, code, named, model, tmp_path, monkeypatch, capsys
):
    (tmp_path / f"{named.removesuffix('.py')}.py").write_text(PARSES)
    words = ["ktd", command, f"{named}:build", *words]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = main()
    out, err = capsys.readouterr()
    assert "usage" not in out + err
    assert found == code, out + err
    assert sys.argv is words


def test_a_file_that_needs_words_of_its_own_says_so(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "needs.py").write_text(PARSES.replace('nargs="*"', 'nargs="+"'))
    words = ["explain", "needs.py:build", *SLICE]
    monkeypatch.setattr(sys, "argv", ["ktd", *words])
    assert main() == 2
    err = capsys.readouterr().err
    assert "usage: needs.py" in err
    assert "error: the following arguments are required: files" in err
    assert sys.argv == ["ktd", *words]


@pytest.mark.parametrize("options", [["--layout", "fsdp"], []])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("of_a_width", "takes no arguments. Received: build='model.py:of_a_width', arguments='(w"),
        (
            "no_model",
            "must return a model, or (model, strategy). Received: build='model.py:no_model'",
        ),
    ],
)
def test_a_function_that_is_none_for_a_command(function, words, options, model, capsys):
    assert main(["explain", f"model.py:{function}", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error


@pytest.mark.parametrize(
    "words",
    [
        ["check", "--model", "model.py:no_model"],
        ["convert", "model.py:no_model", "fast.keras"],
        ["checkpoint", "run", "--to-keras", "x.keras", "--build", "model.py:no_model"],
        ["dry-run", "model.py:no_model", *SLICE, "--batch-size", "8"],
        ["search", "model.py:no_model", *SLICE, "--batch-size", "8"],
    ],
)
def test_a_function_that_returns_no_model(words, model, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert main(words) == 2
    assert re.search("error: .* returns? a (keras.Model|model)", capsys.readouterr().err)


def test_search_does_not_take_a_failed_function_for_a_layout_that_fails(model, capsys):
    assert main(["search", "model.py:raises", *SLICE, "--batch-size", "8"]) == 2
    assert "error: RuntimeError: no labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--here", "--processes", "2"], "Received: processes=2. Leave --here out"),
        (["--here", "--devices", "4"], "Received: devices=4. Leave --here out"),
        (["--processes", "0"], "Received: processes=0, devices=4."),
        (["--restart", "-1"], "Received: restart=-1. Write --restart 10."),
        (
            ["--logs", "model.py"],
            "processes need a folder. Received: logs='model.py', which",
        ),
        (
            ["--logs", "model.py/logs"],
            "processes need a folder. Received: logs='model.py/logs'",
        ),
    ],
)
def test_launch_ignores_no_word(words, error, model, tmp_path, capsys):
    (tmp_path / "script.py").touch()
    assert main(["launch", *words, "script.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert error in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("trian.py", "script='trian.py'. Check the path. Did you mean 'train.py'?"),
        ("no/train.py", "script='no/train.py'. Check the path."),
        ("empty", "a Python file, or a folder with a __main__.py."),
    ],
)
def test_launch_of_no_program_starts_no_process(script, error, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(light, "launch", None)
    assert main(["launch", script]) == 2
    assert error in capsys.readouterr().err


# --- commands that look at a model here ----------------------------------------------------------


def test_explain_on_a_laptop(model, tmp_path):
    code, out, err = ran("explain", "model.py:both", "--devices", "8")
    first = "mlp on 8 devices {'data': 4, 'model': 2}"
    assert (code, out.partition("\n")[0], err) == (0, first, "")


def test_a_file_that_simulates_other_devices_says_so(model, capsys):
    assert main(["explain", "model.py:other_devices", "--devices", "8"]) == 2
    assert "num_devices=2, but JAX already runs on 8" in capsys.readouterr().err


def test_devices_or_a_slice(model, capsys):
    assert main(["explain", model, "--devices", "8", *SLICE]) == 2
    assert "Use only one of them" in capsys.readouterr().err
    assert main(["explain", model, "--devices", "0", "--mesh", "data=8"]) == 2
    assert "num_devices of simulate is a whole number of at least 1" in capsys.readouterr().err
    assert main(["explain", model]) == 2
    assert "A function for explain must return (model, strategy)" in capsys.readouterr().err


def test_explain(model, capsys):
    assert main(["explain", model, "--mesh", "data=4,model=2", "--layout", "tensor_parallel"]) == 0
    assert "mlp/up/kernel" in capsys.readouterr().out
    assert main(["explain", "model.py:both", "--path", "up/kernel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "mlp/up/kernel"
    assert main(["explain", "model.py:both", "--path", "upp/kernel"]) == 2


def test_convert(model, capsys, tmp_path):
    assert main(["convert", "model.py:sequence", "fast.keras"]) == 0
    out = capsys.readouterr().out
    assert "1 layer(s) converted" in out
    assert "keras_tpu_dist.layers.recurrent.LSTM" in out
    faster = keras.saving.load_model("fast.keras")
    assert type(faster.layers[0]).__module__.startswith("keras_tpu_dist")
    # A file is read, too, and keeps its weights.
    stock = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4)])
    stock.save("stock.keras")
    assert main(["convert", "stock.keras", "again.keras", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 1
    assert_close(keras.saving.load_model("again.keras").get_weights(), stock.get_weights())
    assert sorted(path.suffix for path in tmp_path.glob("*.keras")) == [".keras"] * 3


def test_nothing_to_convert(model, capsys, tmp_path):
    assert main(["convert", model, "same.keras"]) == 1
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "same.keras").exists()
    for words, error in (
        (["missing.keras", "x.keras"], "missing.keras"),
        ([model, "x.h5"], "a .keras file"),
        (["model:nothing", "x.keras"], "has no function 'nothing'"),
        (["model.py:sequence", "no/folder.keras"], "in a folder that exists"),
    ):
        assert main(["convert", *words]) == 2, words
        assert error in capsys.readouterr().err


def test_what_a_model_prints_is_no_json(model, capsys, tmp_path):
    (tmp_path / "loud.py").write_text(MODEL.replace("def both():", "def both():\n    print('hi')"))
    assert main(["explain", "loud.py:both", "--json"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["rows"]
    assert streams.err == "hi\n"


# --- commands that compile -----------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """A ranking in the place of compilations; returns what it was asked for."""
    seen = []

    def ranking(build, topology, *args, **options):
        seen.append((topology, args, options))
        return made_comparison()

    monkeypatch.setattr(searching, "search", ranking)
    return seen


def test_search(model, made, capsys, tmp_path):
    words = ["search", model, "--topology", "v5e-16", "--batch-size", "64", "--x", "float32:64"]
    assert main([*words, "--compilations", "2", "--html", "found.html"]) == 0
    text = capsys.readouterr().out
    best = made_comparison().best
    assert text.splitlines()[-1] == f"{best.candidate.line}  # batch_size={best.rows}"
    name, args, options = made[0]
    assert (name, args, options["compilations"], options["cache"]) == (["v5e-16"], (64,), 2, True)
    assert options["x"].shape == (1, 64)
    assert "strategy = ktd.TPUStrategy(" in (tmp_path / "found.html").read_text()
    assert main([*words, "--no-cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topologies"] == ["v5e:4x4"]
    assert made[1][2]["cache"] is False


def test_several_slices(model, made, capsys):
    words = ["search", model, "--topology", "v5e-16, v6e-16", "--batch-size", "64"]
    assert main([*words, "--price", "v5e=1.2, v6e=2.7"]) == 0
    name, _, options = made[0]
    assert name == ["v5e-16", "v6e-16"]
    assert options["price_per_chip_hour"] == {"v5e": 1.2, "v6e": 2.7}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--price", "x"], "--price is the price of a chip-hour"),
        (["--price", "1.20"], "--price is the price of a chip-hour"),
        (["--price", "v5e=0"], "a number above 0"),
        (["--price", "v6e=2"], 'Add "v5e" to it'),
        (["--price", "v5f=2"], "Did you mean 'v5"),
        (["--topology", "v5e-8,v5e-8"], "one slice or several, each of them once"),
        (["--html", "no/page.html"], "in a folder that exists"),
    ],
)
def test_wrong_words_of_a_search(words, error, model, capsys):
    given = ["search", model, "--topology", "v5e-16", "--batch-size", "64"]
    assert main([*given, *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("search", ["--batch-size", "64", "--compilations", "1", "--exact", "0", "--no-cache"]),
        ("dry-run", ["--batch-size", "64"]),
    ],
)
def test_the_compiler_answers_in_silence(command, words, model):
    code, out, err = ran(command, model, "--topology", "v5e:1x1", *words)
    assert code == 0, err
    if command != "dry-run":
        assert out.splitlines()[-1].startswith("strategy = ktd.TPUStrategy(")
    assert err == ""


# --- a check of what is here ---------------------------------------------------------------------


def test_check(model, capsys, tmp_path, monkeypatch):
    words = ["check", "--mesh", "data=4,model=2", "--minutes", "0.0001"]
    assert main([*words, "--model", model, "--html", "check.html"]) == 0
    text = capsys.readouterr().out
    assert "left out: products: " in text
    assert "left out: step: " in text
    assert "left out: programs: " in (tmp_path / "check.html").read_text()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["mesh"]) == (True, {"data": 4, "model": 2})
    assert "step" not in [part["name"] for part in found["parts"]]
    assert main(["check", "--minutes", "0"]) == 2
    assert "a number of minutes above 0" in capsys.readouterr().err
    assert main([*words, "--html", "no/page.html"]) == 2

    def faulty(strategy, todo, minutes):
        problem = checking.Problem("device 3: is wrong", "It is.", "Leave it out.", (3,))
        part = checking.CheckPart("products", "float32", (problem,))
        return checking.Check("cpu", "cpu", (("data", 8),), 1, minutes, 2.0, (part,), ())

    monkeypatch.setattr(method, "run_check", faulty)
    assert main(["check"]) == 1
    assert "device 3: is wrong\n  means: It is." in capsys.readouterr().out


# --- ends ----------------------------------------------------------------------------------------


def test_an_interrupt_has_its_exit_code(model, monkeypatch, capsys, tmp_path):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "search", interrupted)
    assert main(["search", model, *SLICE, "--html", "page.html"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.py"]


def test_an_interrupt_leaves_no_part_of_a_file(tmp_path):
    def save(path):
        pathlib.Path(path).write_text("a part")
        raise KeyboardInterrupt

    (tmp_path / "model.keras").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        _write_whole(str(tmp_path / "model.keras"), save)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def _runs(process_id):
    """Whether a process runs; one that ended stays listed where nobody waits for orphans."""
    try:
        status = pathlib.Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_leaves_no_process(model, tmp_path):
    words = ["dry-run", model, *SLICE, "--batch-size", "64", "--html", "page.html"]
    with started(*words, cwd=tmp_path) as process:
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + 100
        while not (found := children.read_text().split()) and time.monotonic() < end:
            time.sleep(0.05)
        assert found
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    # One that had just begun ends by itself, once it sees that its parent is gone.
    end = time.monotonic() + 30
    while running := [child for child in found if _runs(child)]:
        assert time.monotonic() < end, running
        time.sleep(0.05)
    assert {path.name for path in tmp_path.iterdir()} <= {"model.py", "__pycache__"}


@pytest.mark.slow
def test_a_reader_that_leaves():
    code = "set -o pipefail; {} | head -1"
    command = f"{sys.executable} -m keras_tpu_dist topologies"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-c", code.format(command)]
    done = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[0] == "slice"
    assert done.stderr == ""
