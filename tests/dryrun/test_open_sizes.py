"""Models whose inputs leave a size open: what fills them, and what the error says."""

import re

import jax
import keras
import numpy as np
import pytest
from compile_only import lower
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.tools.shell.main import main

ROWS = 8


def _strategy():
    return ktd.TPUStrategy({"data": 8})


def _slice():
    return ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")


def _compiled(inputs, outputs, loss="mse"):
    return compiled(keras.Model(inputs, outputs), "sgd", loss)


def _tokens(name="token_ids"):
    return keras.Input((None,), dtype="int32", name=name)


def _embedded(tokens):
    return keras.layers.Embedding(16, 4)(tokens)


def words():
    tokens = _tokens()
    return _compiled(tokens, _embedded(tokens))


def features():
    x = keras.Input((None, 6), name="frames")
    return _compiled(x, keras.layers.Dense(4)(x))


def sequential():
    return compiled(keras.Sequential([keras.Input((None, 6)), keras.layers.LSTM(3)]), "sgd", "mse")


def channels_first():
    x = keras.Input((6, None), name="waves")
    return _compiled(x, keras.ops.sum(x, axis=-1))


def attention_mask():
    x, mask = keras.Input((None, 6), name="x"), keras.Input((None, None), name="mask")
    return _compiled({"x": x, "mask": mask}, keras.ops.matmul(mask, x))


def task():
    """As KerasHub's tasks: a dict of inputs."""
    tokens, mask = _tokens(), _tokens("padding_mask")
    x = _embedded(tokens) * keras.ops.cast(mask, "float32")[..., None]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled({"token_ids": tokens, "padding_mask": mask}, x, loss)


def listed():
    tokens, other = _tokens(), keras.Input((4,), name="other")
    return _compiled([tokens, other], [_embedded(tokens), other])


def nested():
    tokens, other = _tokens(), keras.Input((4,), name="other")
    return _compiled({"text": [tokens], "rest": (other,)}, _embedded(tokens))


def images():
    x = keras.Input((None, None, 3), name="images")
    return _compiled(x, keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(x)))


def images_and_text():
    x, tokens = keras.Input((None, None, 3), name="images"), _tokens()
    y = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(x))
    return _compiled({"images": x, "token_ids": tokens}, y[:, None] + _embedded(tokens))


def several_images():
    x, tokens = keras.Input((None, 8, 8, 3), name="images"), _tokens()
    y = keras.ops.mean(x, axis=(1, 2, 3))
    return _compiled([x, tokens], keras.layers.Dense(4)(y)[:, None] + _embedded(tokens))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed, self.head = keras.layers.Embedding(16, 4), keras.layers.Dense(3)

    def call(self, inputs):
        return self.head(self.embed(inputs["token_ids"]))


def subclassed():
    model = Subclassed()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


FILLED = {
    words: 4 * 32,
    features: 4 * 32 * 6,
    sequential: 4 * 32 * 6,
    channels_first: 4 * 32 * 6,
    attention_mask: 4 * (32 * 6 + 32 * 32),
    task: 2 * 4 * 32,
    listed: 4 * (32 + 4),
    nested: 4 * (32 + 4),
}


def _input_bytes(lowered):
    y = re.search(r"y was not given, (.*) is assumed", "\n".join(lowered.notes))[1]
    shapes = re.findall(r"\(([\d, ]*)\)", y)
    sizes = [int(np.prod([int(n) for n in s.split(",") if n.strip()])) for s in shapes]
    return lowered.state.inputs - 4 * sum(sizes) // ROWS


@pytest.mark.parametrize("make", FILLED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("built", [False, True])
def test_sequence_length_fills_open_times(make, built):
    build = make() if built else make
    lowered = lower(build, _strategy(), batch_size=ROWS, sequence_length=32, platform="cpu")
    assert _input_bytes(lowered) == FILLED[make]
    assert any("sequence_length=32 is the open size of" in note for note in lowered.notes)
    if make is task:
        assert lowered.tokens == ROWS * 32


OPEN = {
    **{make: {} for make in FILLED},
    images: {},
    images_and_text: {},
    several_images: {},
}


@pytest.mark.parametrize("make", OPEN, ids=lambda make: make.__name__)
def test_the_error_names_the_input(make):
    with pytest.raises(ValueError, match="is open") as raised:
        ktd.dry_run(make, _slice(), batch_size=ROWS)
    text = str(raised.value)
    for tensor in make().inputs:
        named = f"'{tensor.name}'" in text
        assert named == (None in tensor.shape[1:] and not tensor.name.startswith("keras_tensor"))
    assert ("sequence_length=512" in text) == (make is not images)


def test_what_sequence_length_leaves_open_is_in_the_error():
    with pytest.raises(ValueError, match=r"is open.*'images'") as raised:
        lower(images_and_text, _strategy(), batch_size=8, sequence_length=32, platform="cpu")
    text = str(raised.value)
    assert "'token_ids'" not in text
    assert "sequence_length=" not in text


def test_open_sizes_of_what_is_given():
    # jax.ShapeDtypeStruct takes no None since JAX 0.12.
    x, y = keras.KerasTensor((1, None), "int32"), keras.KerasTensor((1, None, 4), "float32")
    lowered = lower(words, _strategy(), x=x, y=y, batch_size=8, sequence_length=32, platform="cpu")
    assert lowered.state.inputs == 4 * (32 + 32 * 4)
    x = jax.ShapeDtypeStruct((1, 32), "int32")
    with pytest.raises(ValueError, match=r"y of shape \(1, None, 4\).*y with your own sizes"):
        lower(words, _strategy(), x=x, y=y, batch_size=8, platform="cpu")
    tokens = {"token_ids": keras.KerasTensor((1, None), "int32")}
    lowered = lower(
        subclassed,
        _strategy(),
        x=tokens,
        y=keras.KerasTensor((1, None), "int32"),
        batch_size=8,
        sequence_length=32,
        platform="cpu",
    )
    assert lowered.state.inputs == 2 * 4 * 32


def test_time_that_is_the_first_dimension():
    x = keras.Input(batch_shape=(None, None, 6), name="frames")

    def build():
        return _compiled(x, keras.layers.Dense(4)(x))

    strategy = ktd.TPUStrategy({"data": 8}, batch_axis=1)
    lowered = lower(build, strategy, batch_size=8, sequence_length=32, platform="cpu")
    assert _input_bytes(lowered) == 4 * 32 * 6


def test_a_length_without_an_open_size_is_refused():
    def build():
        return compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), "sgd", "mse")

    with pytest.raises(ValueError, match=r"fills open sizes.*x\(None, 4\)"):
        ktd.dry_run(build, _slice(), batch_size=8, sequence_length=32)
    with pytest.raises(ValueError, match=r"needs to know the input"):
        ktd.dry_run(subclassed, _slice(), batch_size=8, sequence_length=32)


@pytest.mark.parametrize("make", [task, listed, features])
def test_predict_and_evaluate(make):
    for mode in ("predict", "evaluate"):
        options = {"batch_size": ROWS, "mode": mode, "platform": "cpu"}
        lowered = lower(make, _strategy(), sequence_length=32, **options)
        assert lowered.state.inputs >= FILLED[make]
        with pytest.raises(ValueError, match="is open"):
            lower(make, _strategy(), **options)


@pytest.mark.slow
def test_a_task_of_keras_hub():
    keras_hub = pytest.importorskip("keras_hub", reason="there is no KerasHub here")

    def build():
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=64,
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            max_sequence_length=32,
        )
        model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with pytest.raises(ValueError, match=r"x\['token_ids'\].*Give sequence_length=512"):
        ktd.dry_run(build, _slice(), batch_size=ROWS)
    run = ktd.dry_run(build, _strategy(), batch_size=ROWS, sequence_length=32)
    assert run.tokens == ROWS * 32


def test_dry_run_in_the_shell_asks_for_the_sequence_length(tmp_path, capsys, monkeypatch):
    (tmp_path / "models_with_open_sizes.py").write_text(
        "import keras\n"
        "def build():\n"
        "    x = keras.Input((None, 6), name='frames')\n"
        "    model = keras.Model(x, keras.layers.Dense(4)(x))\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    model = "models_with_open_sizes.py:build"
    words = ["dry-run", model, "--topology", "v5e-8", "--batch-size", "8"]
    assert main(words) == 2
    assert "--sequence-length 512" in capsys.readouterr().err
    monkeypatch.setattr(dryrun, "has_libtpu", lambda: False)
    assert main([*words, "--sequence-length", "16", "--json"]) == 0
    assert "sequence_length=16" in capsys.readouterr().out
    assert main([*words[:4], "--sequence-length", "16"]) == 2
    assert "batch_size=None, without libtpu" in capsys.readouterr().err


def test_search_says_the_same():
    with pytest.raises(ValueError, match=r"is open.*'token_ids'.*or x with your own sizes"):
        ktd.search(task, "v5e:2x4")


def test_search_passes_the_length_on():
    found = ktd.search(
        task, "v5e:2x4", 8, sequence_length=32, budget_s=1e-9, compilations=1, exact=0
    )
    assert any("sequence_length=32" in note for note in found.compiled[0].run.notes)


def test_without_a_batch_size_and_a_limit():
    with pytest.raises(ValueError, match=r"batch_size=None, without a slice"):
        ktd.dry_run(task, _strategy(), sequence_length=32)


def test_without_a_batch_size_the_largest_is_taken(monkeypatch):
    """The report says so."""
    real = dryrun.run_once
    tried = []

    def small(subject, how):
        batch_size = subject.batch_size
        tried.append(batch_size)
        run = real(subject, how)
        fits = batch_size <= 64
        return dryrun.replace(run, fits=fits, total_bytes=batch_size * 2**26)

    monkeypatch.setattr(dryrun, "run_once", small)
    run = ktd.dry_run(task, _slice(), sequence_length=32)
    assert (run.batch_size, run.fits) == (64, True)
    assert len(tried) < 9
    assert any("batch_size was not given: 64 is the largest" in note for note in run.notes)
