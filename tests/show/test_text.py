import pytest

from keras_tpu_dist.show.text import (
    duration_text,
    html_table,
    size_text,
    text_table,
    text_width,
    wrapped,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (1023 * 2**10, "1023.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.00 GiB"),
        (int(15.75 * 2**30), "15.75 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**21), "-2.0 MiB"),
    ],
)
def test_bytes_in_readable_units(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (2e-7, "0.2 us"),
        (1e-3, "1.00 ms"),
        (90.0, "90.00 s"),
        (0.9999999, "1.00 s"),
        (0.99, "990.00 ms"),
    ],
)
def test_seconds_in_readable_units(seconds, text):
    assert duration_text(seconds) == text


def test_columns_of_numbers_stand_right_and_words_left():
    rows = [("a", "1.5 KiB", "x", "-"), ("bcd", "12", "12 rows", "7%")]
    assert text_table(("name", "size", "note", "share"), rows, indent="").splitlines() == [
        "name     size  note     share",
        "a     1.5 KiB  x            -",
        "bcd        12  12 rows     7%",
    ]
    assert text_table((), [("a", "1"), ("b", "20")]) == "  a   1\n  b  20"
    assert text_table(("a", "b"), []) == "  a  b"
    assert text_table((), []) == ""
    with pytest.raises(ValueError, match="shorter"):
        text_table(("a", "b"), [("only one",)])


def test_html_is_escaped():
    row = '<tr><td>&lt;b&gt;</td><td class="n">1</td></tr>'
    assert html_table((), [("<b>", "1")]) == f"<table>{row}</table>"
    assert "<th>&amp;</th>" in html_table(("&",), [])


ROWS = [
    ("decoder_0/up/kernel", "64 B", "row: fed by 'down', after a sum over it"),
    "a line of its own",
    ("norm/scale", "1.5 KiB", "replicated"),
]


def test_words_of_a_wide_table_wrap():
    def lines(width):
        return text_table(("weight", "bytes", "reason"), ROWS, indent="", width=width).splitlines()

    assert lines(80) == [
        "weight                 bytes  reason",
        "decoder_0/up/kernel     64 B  row: fed by 'down', after a sum over it",
        "a line of its own",
        "norm/scale           1.5 KiB  replicated",
    ]
    assert lines(61)[1:3] == [
        "decoder_0/up/kernel     64 B  row: fed by 'down', after a sum",
        "                              over it",
    ]
    # too little room to read in: below its row
    assert lines(40) == [
        "weight                 bytes",
        "    reason",
        "decoder_0/up/kernel     64 B",
        "    row: fed by 'down', after a sum over",
        "    it",
        "a line of its own",
        "norm/scale           1.5 KiB",
        "    replicated",
    ]
    assert lines(25)[2:5] == ["decoder_0/up/        64 B", "kernel", "    row: fed by 'down',"]
    assert all(len(line) <= width for width in (25, 40, 61) for line in lines(width))


def test_ranges_are_numbers():
    rows = [("a", "1.2 to 3.4 ms"), ("b", "900.0 us to 1.20 ms"), ("c", "5.00 ms")]
    assert text_table((), rows, indent="", width=12).splitlines() == [
        "a        1.2 to 3.4 ms",
        "b  900.0 us to 1.20 ms",
        "c              5.00 ms",
    ]


def test_rows_share_words_below_them():
    reason = "column: feeds 'attention/output'"
    rows = [(name, "1", reason) for name in ("query", "key")] + [
        ("  bias", "2", "replicated, small")
    ]
    text = text_table(("", "n", "why"), [*rows, "across", rows[-1]], indent="", width=36)
    assert text.splitlines()[2:] == [
        "query   1",
        "key     1",
        "    column: feeds 'attention/output'",
        "  bias  2",
        "    replicated, small",
        "across",
        "  bias  2",
        "    replicated, small",
    ]


def test_what_wraps_stays_indented():
    rows = [("  self_attention/query/kernel", "1.0 MiB")]
    text = text_table((), rows, indent="", width=28)
    assert text.splitlines() == ["  self_attention/    1.0 MiB", "  query/kernel"]


def test_the_widest_words_wrap_first():
    """A short last column stays beside its row."""
    rows = [("data 16", "too large: it needs twice the memory that it has", "links")]
    text = text_table(("mesh", "verdict", "bound by"), rows, indent="", width=50)
    assert text.splitlines() == [
        "mesh     verdict                          bound by",
        "data 16  too large: it needs twice the    links",
        "         memory that it has",
    ]


def test_every_letter_of_a_long_word_is_there():
    assert wrapped("a/b/" + "c" * 9, 5) == ["a/b/", "ccccc", "cccc"]
    assert wrapped("", 5) == [""]
    assert wrapped("layer_normalization/scale", 14) == ["layer_", "normalization/", "scale"]
    assert wrapped("    " + "x" * 9, 6) == ["   xxx", "   xxx", "   xxx"]


@pytest.mark.parametrize(("columns", "width"), [("", 100), ("80", 80), ("200", 200), ("20", 60)])
def test_tables_are_as_wide_as_the_terminal(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    assert text_width() == width
