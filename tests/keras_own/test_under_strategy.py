"""A sample of Keras's own tests, with a `TPUStrategy` active; `run.py` runs them all."""

from pathlib import Path

import exceptions
import pytest
import suite
import verdict

PROBE = Path(__file__).with_name("probe_distribution.py")
# Files of each kind of promise that take a few seconds together.
SAMPLE = [
    "callbacks/early_stopping_test.py",
    "callbacks/model_checkpoint_test.py",
    "callbacks/swap_ema_weights_test.py",
    "callbacks/terminate_on_nan_test.py",
    "trainers/trainer_test.py",
]
TESTS = (
    "EarlyStopping or TerminateOnNaN or SwapEMA or train_on_batch or sample_weight"
    " or predict_flow or predict_one_pass or steps_per_epoch"
)


class TestTheDistributionIsActive:
    def test_in_the_body_of_every_kind_of_test(self):
        outcomes = suite.run_files([str(PROBE)], "ours")
        assert [outcome.outcome for outcome in outcomes] == ["passed"] * 3, outcomes


class TestSample:
    def test_no_failure_outside_the_list(self):
        outcomes = suite.run_files(SAMPLE, "ours", expression=TESTS)
        found = verdict.judge("sample", "ours", outcomes)
        assert found.run >= 20
        assert not found.new, str(found)
        assert not found.healed, str(found)


class TestVerdict:
    def outcome(self, test, outcome="failed"):
        return suite.Outcome(test, outcome, "E")

    def test_sorts_what_failed(self, monkeypatch):
        monkeypatch.setattr(exceptions, "EXCEPTIONS", {"a.py::*": "counts traces"})
        here = [self.outcome("a.py::x"), self.outcome("b.py::y"), self.outcome("c.py::z", "hang")]
        here += [self.outcome("a.py::w", "passed"), self.outcome("d.py::s", "skipped")]
        found = verdict.judge("some", "ours", here, [self.outcome("b.py::y")])
        assert (found.run, found.skipped, found.failed) == (4, 1, 3)
        assert [o.id for o in found.expected] == ["a.py::x"]
        assert [o.id for o in found.kerass] == ["b.py::y"]
        assert [o.id for o in found.new] == ["c.py::z"]
        assert found.healed == ("a.py::w",)
        assert not found.good
        assert "NEW      hang    c.py::z: E" in str(found)

    def test_each_exception_has_a_reason(self):
        for test, words in exceptions.EXCEPTIONS.items():
            assert test.count("::") == 2
            assert words.endswith(".")


class TestTests:
    @pytest.mark.parametrize("package", suite.PACKAGES)
    def test_keras_has_some(self, package):
        assert suite.files_of(package)
