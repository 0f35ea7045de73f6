"""What results show at a prompt: what `print` does, not the fields of a dataclass."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
from dryrun.made import made_comparison, made_run
from helpers import built, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.common.printed import Printed

# Records of what is replaced in Keras and XLA, which nobody is given.
INNER = ("keras_tpu_dist._keras", "keras_tpu_dist.programs.partitioner")


def results():
    """Every dataclass that says how it prints."""
    for module in pkgutil.walk_packages(ktd.__path__, "keras_tpu_dist."):
        if module.name.startswith(INNER) or module.name.endswith("__main__"):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            own = kind.__module__ == module.name and dataclasses.is_dataclass(kind)
            if own and (issubclass(kind, Printed) or kind.__str__ is not object.__str__):
                yield kind


@pytest.mark.parametrize("kind", list(results()), ids=lambda kind: kind.__name__)
def test_a_result_shows_what_it_prints(kind):
    assert kind.__repr__ is Printed.__repr__
    assert kind.__str__ is not object.__str__


def test_at_a_prompt():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    model = built(mlp, strategy)
    explanation, report = strategy.explain(model), strategy.lint(model, 13)
    shown = [explanation, explanation.rows[0], report, *report.findings, strategy.plan(model)]
    shown += [strategy.show(), strategy.show(model), strategy.show(model.weights[0])]
    shown += [made_run(), made_comparison()]
    for result in shown:
        assert repr(result) == str(result)
        assert not repr(result).startswith(f"{type(result).__name__}(")
