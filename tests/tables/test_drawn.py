"""Models with tables drawn at random, a few of them."""

import pytest
import table_programs
from drawing import run_all
from drawn import WORKER
from table_options import OPTIONS, drawn, is_legal


@pytest.mark.slow
def test_drawn_models_equal_one_device():
    """`python tests/tables/drawn.py` draws others."""
    programs = [drawn(seed) for seed in (1, 2, 100, 101)]
    found = run_all(programs, WORKER, processes=1, timeout=600)
    assert [str(each) for each in found if each.outcome != "right"] == []
    assert len(found) == len(programs)


def test_a_seed_is_one_program():
    assert drawn(5) == drawn(5)
    assert drawn(5).choices != drawn(6).choices
    assert all(is_legal(drawn(seed).choices) for seed in range(50))
    with pytest.raises(ValueError, match="no legal program has"):
        drawn(0, {"tables": "lazy", "optimizer": "adam"})


def test_every_option_has_what_it_names():
    known = {"model": table_programs.MODELS, "place": table_programs.PLACES}
    known["optimizer"] = table_programs.OPTIMIZERS
    for name, values in known.items():
        assert set(OPTIONS[name]) == set(values)
