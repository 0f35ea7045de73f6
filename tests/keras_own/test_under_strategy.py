"""A sample of Keras's own tests, with a `TPUStrategy` active; `run.py` runs them all."""

from pathlib import Path

import exceptions
import pytest
import suite
import verdict

PROBE = Path(__file__).with_name("probe_distribution.py")
# What takes a few seconds and needs no TensorFlow; two of the exceptions are among it.
SAMPLE = [
    "callbacks/early_stopping_test.py",
    "callbacks/learning_rate_scheduler_test.py",
    "callbacks/terminate_on_nan_test.py",
    "trainers/trainer_test.py",
]
# All other ids are the probe's.
KERASS = ("callbacks/", "trainers/")
TESTS = (
    "probe_distribution or LearningRateScheduler or early_stopping_reuse or test_TerminateOnNaN"
    " or test_fit_flow or predict_flow or test_predict_preserve_order or test_retracing"
    " or test_on_batch_methods or test_steps_per_epoch_not_match_too_low or jax_model_weights"
    " or execution_steps_per_epoch_match_multi_epoch_jit"
)


class TestSample:
    @pytest.mark.slow
    def test_no_failure_outside_the_list(self):
        pytest.importorskip("tensorflow")  # some of Keras's tests read tf.data
        # In one process: starting one takes as long as these tests.
        outcomes = suite.run_files([str(PROBE), *SAMPLE], "ours", expression=TESTS)
        probes = [outcome for outcome in outcomes if not outcome.id.startswith(KERASS)]
        assert [outcome.outcome for outcome in probes] == ["passed"] * 3, probes
        found = verdict.judge("sample", "ours", outcomes)
        assert found.run >= 20
        assert len(found.expected) == 2
        assert not found.new, str(found)
        assert not found.healed, str(found)


class TestHangAndAbort:
    FILE = """
import os, time

def test_first(): pass
def test_abort(): os.abort()
def test_hang(): time.sleep(1000)
def test_last(): assert False, "last"
"""

    @pytest.mark.slow
    def test_are_findings_and_the_rest_is_run(self, tmp_path):
        file = tmp_path / "probe_dead.py"
        file.write_text(self.FILE)
        outcomes = suite.run_files([str(file)], "none", timeout=8)
        assert [o.outcome for o in outcomes] == ["passed", "abort", "hang", "failed"]
        assert "Fatal Python error: Aborted" in outcomes[1].line
        assert outcomes[2].line == "8 s without an end"
        assert "last" in outcomes[3].line


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
        if not any(map(suite.files_of, suite.PACKAGES)):
            pytest.skip("a nightly Keras brings no tests")
        assert suite.files_of(package)
