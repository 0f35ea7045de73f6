"""Reports that the site shows are as they are written now."""

import re

import keras
import pytest
from helpers import of_docs

from keras_tpu_dist.show.page import document

REPORTS = of_docs("reports")


@pytest.mark.slow
def test_the_drawing_of_a_model_that_the_site_shows_is_as_it_is_drawn_now():
    """`python docs/reports.py model.html` writes it anew."""
    keras.backend.clear_session()
    assert (REPORTS.REPORTS / "model.html").read_text() == REPORTS.PAGES["model.html"]()


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["dry_run.html", "search.html"])
def test_a_report_that_the_site_shows_says_what_it_says_now(name):
    """But for numbers: `python docs/reports.py NAME` writes it anew."""
    keras.backend.clear_session()
    shown = (REPORTS.REPORTS / name).read_text()
    assert REPORTS.structure(shown) == REPORTS.structure(REPORTS.PAGES[name]())


@pytest.mark.slow
def test_the_check_that_the_site_shows_names_what_it_names_now():
    """`python docs/reports.py check.html` writes it anew."""
    keras.backend.clear_session()
    shown = REPORTS.names((REPORTS.REPORTS / "check.html").read_text())
    assert {"is it correct?", "products", "collectives", "step", "programs"} <= shown
    assert shown <= REPORTS.names(REPORTS.PAGES["check.html"]())


@pytest.mark.parametrize("path", sorted(REPORTS.REPORTS.iterdir()), ids=lambda path: path.name)
def test_a_report_that_the_site_shows_has_the_style_of_now(path):
    """Each is small, loads and runs nothing, and has the style of `show.page`."""
    text = path.read_text()
    assert len(text) < 150_000
    assert not re.search(r'(?:src|href)="|url\(', text)
    assert "<script" not in text
    assert re.findall("<style>.*?</style>", document("", []), re.DOTALL)[0] in text


def test_the_structure_of_a_report_has_no_numbers_and_no_order():
    one = "<style>p{top:1px}</style><td>1.5 GiB</td><td>step 3</td><p>within 1e-07, 2,000 us</p>"
    other = "<p>within 6.2e-08, 1.21 ms</p><td>17.2 MiB</td><td>step 12</td>"
    assert REPORTS.structure(one) == REPORTS.structure(other) == {"#", "step #", "within #, #"}
    assert REPORTS.structure(one) != REPORTS.structure(other.replace("step", "stop"))


def test_the_site_shows_every_report():
    text = "".join(page.read_text() for page in of_docs("reader").PAGES)
    assert {path.name for path in REPORTS.REPORTS.iterdir()} == {*REPORTS.PAGES}
    for name in REPORTS.PAGES:
        assert f'<iframe class="report" src="reports/{name}"' in text
        assert f"](reports/{name})" in text
