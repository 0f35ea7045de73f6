import dataclasses
import html.parser
import re

import pytest
from dryrun.made import EVIL, made_comparison, made_run

import keras_tpu_dist as ktd
from keras_tpu_dist.show.chart import Point, scatter_svg
from keras_tpu_dist.tools.dryrun.page import kinds_of_memory

GIB = 2**30


class Seen(html.parser.HTMLParser):
    """Tags that were never closed, and what would be loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "br", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)


@pytest.mark.parametrize("make", [made_run, made_comparison])
def test_a_page_is_whole_and_needs_nothing_else(make):
    text = make().to_html()
    seen = Seen(text)
    assert (seen.open, seen.loads) == ([], [])
    assert "script" not in seen.tags
    assert "img" not in seen.tags
    assert EVIL not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "prefers-color-scheme:dark" in text
    fragment = Seen(make()._repr_html_())
    assert fragment.open == []
    assert "script" not in fragment.tags
    assert EVIL not in make()._repr_html_()


def test_a_page_is_written_as_a_whole(tmp_path):
    run = made_run()
    file = tmp_path / "report.html"
    file.write_text("what was there")
    assert run.to_html(file) is None
    assert file.read_text() == run.to_html()
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match=r"in a folder that exists.*no/report.*Create the folder"):
        run.to_html(tmp_path / "no" / "report.html")
    with pytest.raises(ValueError, match=r"Add the name of a file"):
        run.to_html(tmp_path)


def test_what_could_not_be_written_leaves_the_old_page(tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    file.write_text("what was there")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        made_run().to_html(file)
    assert [(f, f.read_text()) for f in tmp_path.iterdir()] == [(file, "what was there")]


def test_memory_by_kind_adds_up():
    run = made_run()
    kinds = dict(kinds_of_memory(run))
    assert sum(kinds.values()) == run.total_bytes
    assert kinds["weights"] == GIB
    assert kinds["temporaries and activations"] == 6 * GIB
    text = run.to_html()
    limit = run.limit_bytes / max(run.limit_bytes, run.total_bytes)
    assert f'<b style="left:calc({100 * limit:.2f}% - 2px)">' in text
    # what does not fit and could not be sized has its state alone, and a remainder
    large = made_run(fits=False, total_bytes=40 * GIB, memory={}, estimate=None, cost=None)
    text = large.to_html()
    assert "does NOT fit" in text
    assert "of no known kind" in text
    assert [name for name, _ in kinds_of_memory(large)] == ["weights", "optimizer", "batch"]


def test_without_a_tpu_compiler_there_is_still_a_page():
    run = made_run(compiled_for="CPU", fits=None, limit_bytes=None, estimate=None, total_bytes=0)
    text = run.to_html()
    assert "memory limit unknown" in text
    assert "Time of a step" not in text


def test_points_stand_where_their_numbers_say():
    points = [
        Point(1, "a", "fsdp", 2 * GIB, (1e-3, 1e-3), True),
        Point(2, "b", "auto", 4 * GIB, (2e-3, 3e-3), True),
        Point(3, "c", "auto", 20 * GIB, None, False),
    ]
    svg = scatter_svg(points, 16 * GIB)
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    ]
    (x1, y1), (x2, y2), (x3, y3) = places
    zero = 2 * x1 - x2  # twice the bytes are twice as far from nothing
    assert x3 - zero == pytest.approx(10 * (x1 - zero), abs=2)
    assert y3 < y2 < y1
    assert "no time" in svg
    assert "too large" in svg


def test_a_comparison_without_times_says_why():
    ranked = made_comparison()
    none = [c for c in ranked.candidates if c.run is None or c.run.estimate is None]
    text = dataclasses.replace(ranked, compiled=tuple(none)).to_html()
    assert "no candidate fits: step time is not drawn" in text
    assert "<svg" not in text
    assert "0 candidates" in dataclasses.replace(ranked, compiled=()).to_html()


def test_a_program_that_fits_may_need_more_than_the_limit_in_turns():
    run = made_run(fits=True)
    assert run.overflow_bytes == run.peak_bytes == 0
    memory = {**run.memory, "peak": 14 * GIB}
    large = made_run(fits=True, total_bytes=21 * GIB, memory=memory)
    assert large.overflow_bytes == 0
    assert large.peak_bytes == 14 * GIB
    assert re.search(
        r"total +21.00 GiB\n +limit +15.75 GiB\n +of it at one time +14.00 GiB", str(large)
    )
    assert "too much" not in str(large)
    refused = made_run(fits=False, total_bytes=21 * GIB, memory=memory)
    assert refused.overflow_bytes == 21 * GIB - refused.limit_bytes
    assert "too much" in str(refused)


def test_a_page_does_not_follow_links_beside_it(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    # Whoever may write there guesses the name; none of them is followed.
    monkeypatch.setattr("os.getpid", lambda: 7)
    monkeypatch.setattr("secrets.token_hex", lambda n: "7")
    for name in (".page.html.7.part", ".picture.svg.7.part"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        made_run().to_html(tmp_path / "page.html")
    monkeypatch.undo()
    made_run().to_html(tmp_path / "page.html")
    ktd.TPUStrategy().show().save(tmp_path / "picture.svg")
    assert victim.read_text() == "precious"
    assert (tmp_path / "page.html").stat().st_mode & 0o444 == 0o444


def test_a_page_needs_a_path(tmp_path):
    for wrong in ("", 3, True):
        with pytest.raises(ValueError, match=r"needs the path of a file\. Received: path="):
            made_run().to_html(wrong)
    with pytest.raises(ValueError, match="a folder that exists"):
        ktd.TPUStrategy().show().save(tmp_path / "no" / "a.svg")


def test_a_picture_needs_a_format(tmp_path):
    with pytest.raises(ValueError, match=r"written as an \.svg or \.html file.*a\.xyz"):
        ktd.TPUStrategy().show().save(tmp_path / "a.xyz")
