"""What a report only counts stops neither a dry run, nor a verification, nor a fit."""

import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import rates
from keras_tpu_dist.common.left_out import counted
from keras_tpu_dist.tools.dryrun import build as dryrun
from keras_tpu_dist.tools.dryrun import run as of_run
from keras_tpu_dist.tools.dryrun.build import Subject
from keras_tpu_dist.tools.dryrun.compile import Compiled
from keras_tpu_dist.tools.dryrun.inputs import Inputs


class Field(keras.Model):
    """As NeRF: a step makes two inputs of a batch of rays, and calls the model on these."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8)
        self.colour = keras.layers.Dense(3)

    def build(self, shapes=None):
        self.hidden.build((None, 4))
        self.colour.build((None, 8))
        self.built = True

    def call(self, inputs):
        if not isinstance(inputs, (list, tuple)):
            raise ValueError("Points and directions are two inputs.")
        points, directions = inputs
        return self.colour(self.hidden(keras.ops.concatenate([points, directions], -1)))

    def train_step(self, state, data):
        rays, y = data
        trainable, others, slots, metrics = state

        def loss(trainable):
            inputs = [rays[:, :2], rays[:, 2:]]
            outputs, _ = self.stateless_call(trainable, others, inputs)
            return keras.ops.mean((outputs - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, others, slots, metrics)


def field():
    model = Field()
    model.build()
    model.compile("sgd")
    return model


X, Y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")


def subject(build=field):
    return Subject(build, ktd.TPUStrategy(topology="v5e:2x4"), 8, Inputs(x=X, y=Y))


def test_a_step_that_does_not_call_the_model_on_x_is_dry_run():
    lowered = dryrun.lower(subject())
    assert lowered.model_flops == 0
    assert lowered.state.weights == 4 * (4 * 8 + 8 + 8 * 3 + 3)
    (said,) = (note for note in lowered.notes if "not counted" in note)
    assert said.startswith("model FLOPs utilisation: not counted, because of ValueError")
    assert "Points and directions are two inputs." in said


def failing(*args, **kwargs):
    raise KeyError("frob")


@pytest.mark.parametrize(
    ("where", "figure"),
    [
        ("levers_of", "what to change"),
        ("model_flops", "model FLOPs utilisation"),
        ("lint", "mistakes in the layouts"),
        ("head", "heads in pieces"),
    ],
)
def test_each_figure_of_a_lowered_step_is_left_out_with_its_reason(where, figure, monkeypatch):
    step = subject()
    if where == "lint":
        monkeypatch.setattr(type(step.strategy), "lint", failing)
    elif where == "head":
        monkeypatch.setattr(dryrun.head, "described", failing)
    else:
        monkeypatch.setattr(dryrun, where, failing)
    lowered = dryrun.lower(step)
    assert f"{figure}: not counted, because of KeyError: 'frob'" in lowered.notes


@pytest.mark.parametrize("where", ["analyze", "what_to_change"])
def test_each_figure_of_a_compiled_step_is_left_out_with_its_reason(where, monkeypatch):
    memory = dict.fromkeys(("arguments", "outputs", "aliased", "temporaries", "code", "peak"), 1)
    text = "ENTRY %e (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0)\n}\n"
    answer = Compiled(text, memory, None, (), "quick", "v5e:2x4", 1.0, 1.0, 1)
    monkeypatch.setattr(of_run, "compile_lowered", lambda *args, **options: answer)
    monkeypatch.setattr(of_run, where, failing)
    run = ktd.dry_run(field, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=8, x=X, y=Y)
    figure = "operations, bytes and times" if where == "analyze" else "what to change"
    assert f"{figure}: not counted, because of KeyError: 'frob'" in run.notes
    assert run.fits
    assert (run.cost is None, run.changes) == (where == "analyze", ())
    assert figure in str(run)


def test_rates_leave_out_what_they_cannot_count(monkeypatch, caplog):
    class Kind:
        flops, devices = (("bfloat16", 1e12),), 1

    monkeypatch.setattr(rates, "of_kind", lambda kind: Kind)
    seen = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    with ktd.TPUStrategy().scope():
        model = field()
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[ktd.callbacks.Rates(), keep])
    assert [("mfu" in logs, "rows_per_second" in logs) for logs in seen] == [(False, True)] * 2
    (said,) = [r.getMessage() for r in caplog.records if "not counted" in r.getMessage()]
    assert said.startswith("Rates: mfu: not counted, because of ValueError")


def test_a_long_reason_is_cut():
    said = []

    def count():
        raise ValueError("a\n  b " * 500)

    assert counted("x", count, 7, said.append) == 7
    assert said[0].startswith("x: not counted, because of ValueError: a b a b")
    assert len(said[0]) < 360
    assert counted("x", lambda: 3, 7, said.append) == 3
    assert len(said) == 1
