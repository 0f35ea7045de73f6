"""Libraries that put functions in front of Keras's methods, before or after ours."""

import pathlib

import pytest
from helpers import python

PROGRAM = pathlib.Path(__file__).with_name("wrapped.py")


@pytest.mark.parametrize("place", ["model", "subclass"])
@pytest.mark.parametrize("moment", ["import", "strategy", "end"])
def test_methods_that_another_library_has_replaced(moment, place):
    assert python(PROGRAM, moment, place).stdout.endswith("all right\n")
