"""Tables of reports: a click sorts a column by its numbers, not by their text."""

import dataclasses
import re

from dryrun.made import made_run
from show.every_page import pages

from keras_tpu_dist.tools.dryrun.changes import Change
from keras_tpu_dist.tools.searches.advise import Advice, Advised

# Of bytes, times and plain numbers.
_NUMBER = re.compile(r"-?[\d,.]+( (B|[KMGTP]iB|us|ms|s))?")


def reports():
    yield from pages()
    run = made_run()
    change = Change("batch", "rows per second", 3.0, 30.0, "batch_size=80")
    tried = (Advised(change, run, 9.5), Advised(change, None, None, "pass the function"))
    yield "advice", Advice(run, tried)
    yield "advice without times", Advice(dataclasses.replace(run, estimate=None), ())


def test_numbers_are_sorted_as_numbers():
    for name, report in reports():
        for table in re.findall(
            r'<table class="sortable">.*?</table>', report.to_html(), re.DOTALL
        ):
            for attributes, text in re.findall(r"<td([^>]*)>([^<]*)</td>", table):
                assert "data-value" in attributes or not _NUMBER.fullmatch(text), (name, text)
