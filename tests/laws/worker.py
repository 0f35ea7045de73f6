"""Judges case after case: a line of JSON in, a line out. A process, since XLA may abort."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "conformance"), str(TESTS)]
import serving  # first: it chooses the devices  # noqa: E402

# isort: split
import functools  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import warnings  # noqa: E402

import keras  # noqa: E402


def wrap():
    """What mlflow's `autolog` does: methods of Keras that hold those which they found."""
    for name in ("fit", "evaluate", "predict"):
        setattr(keras.Model, name, _wrapped(getattr(keras.Model, name)))


def _wrapped(stock):
    @functools.wraps(stock)
    def call(self, *args, **kwargs):
        return stock(self, *args, **kwargs)

    return call


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if os.environ.get("KTD_LAWS_WORLD") == "wrapped":
        wrap()
    from laws import interrupted, judging

    for name in ("keras_tpu_dist", "absl"):
        logging.getLogger(name).setLevel(os.environ.get("KTD_LAWS_LOG", "ERROR"))
    if sys.argv[1:]:
        interrupted.run_part(json.loads(sys.argv[1]))
    else:
        serving.serve(judging.compared)
