import pytest

from keras_tpu_dist.show.folding import (
    Repeated,
    families,
    folded,
    kind_of,
    pattern_of,
    short_rows,
    unnumbered,
)


def of(paths, key=lambda path: None):
    return folded(paths, str, key)


def rows_in(entries):
    for entry in entries:
        yield from rows_in(entry.entries) if isinstance(entry, Repeated) else [entry]


def block(n, names=("query/kernel", "out/kernel", "norm/scale")):
    return [f"block_{n}/{name}" for name in names]


def test_blocks_of_a_composite_layer():
    paths = ["words/table", *(p for n in range(4) for p in block(n)), "norm/scale"]
    first, blocks, last = of(paths)
    assert (first, last) == ("words/table", "norm/scale")
    assert (blocks.words, blocks.times) == ("block_0 .. block_3", 4)
    assert blocks.rows == blocks.entries == tuple(block(0))


def test_the_first_of_automatic_names_has_no_number():
    names = ["dense", *(f"dense_{n}" for n in range(1, 5))]
    (blocks,) = of([f"{name}/{w}" for name in names for w in ("kernel", "bias")])
    assert (blocks.words, blocks.times) == ("dense .. dense_4", 5)


def test_blocks_of_several_layers_side_by_side():
    paths = ["stem/kernel"]
    for n in range(3):
        paths += [f"norm_{n}/scale", f"dense_{2 * n}/kernel", f"dense_{2 * n + 1}/kernel"]
    _, blocks = of(paths)
    assert (blocks.first, blocks.last, blocks.times) == ("norm_0", "dense_5", 3)
    assert blocks.rows == tuple(paths[1:4])


def test_weights_that_do_not_train_stand_with_their_layer():
    trained = [f"block_{n}/norm/gamma" for n in range(4)]
    others = [f"block_{n}/norm/{w}" for n in range(4) for w in ("mean", "variance")]
    (blocks,) = of([*trained, *others])
    assert blocks.rows == ("block_0/norm/gamma", "block_0/norm/mean", "block_0/norm/variance")


def test_blocks_within_blocks_and_two_stacks():
    paths = [
        f"{stack}/layer_{n}/expert_{e}/{w}"
        for stack in ("encoder", "decoder")
        for n in range(3)
        for e in range(5)
        for w in ("up", "down")
    ]
    entries = of(paths)
    assert [(e.words, e.times) for e in entries] == [
        ("encoder/layer_0 .. encoder/layer_2", 3),
        ("decoder/layer_0 .. decoder/layer_2", 3),
    ]
    (inner,) = entries[0].entries
    assert (inner.first, inner.times) == ("encoder/layer_0/expert_0", 5)
    assert len(entries[0].rows) == 10


def test_what_differs_in_its_key_is_shown():
    paths = [p for n in range(6) for p in block(n)]
    entries = of(paths, lambda path: ("model",) if "block_2" in path else ())
    assert list(rows_in(entries)) == [*block(0), *block(1), *block(2), *block(3)]
    # what is only numbered otherwise is equal
    (whole,) = of(paths, lambda path: (f"feeds {path!r}",))
    assert whole.times == 6


def test_few_lines_are_left_as_they_are():
    paths = ["up/kernel", "up/bias", "up_1/kernel", "up_1/bias"]
    assert of(paths) == tuple(paths)
    assert of([]) == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [("a_1/b", "a/b"), ("conv2_block1_1/kernel", "conv2_block2_1/kernel"), ("h.0/b", "h.11/b")],
)
def test_numbers_that_tell_layers_apart(one, other):
    assert unnumbered(one) == unnumbered(other)


def test_numbers_within_names_are_names():
    assert unnumbered("conv2d/kernel") != unnumbered("conv/kernel")


def shortened(paths, key=lambda path: ""):
    return short_rows(paths, str, key, lambda rows, name, within: (name, str(len(rows))))


def test_neighbours_of_one_layer_share_a_line():
    assert shortened(["norm/gamma", "norm/beta", "out/kernel", "out_1/kernel"]) == [
        ("norm/{gamma, beta}", "2"),
        ("out/kernel", "1"),
        ("out_1/kernel", "1"),
    ]
    differ = shortened(["norm/gamma", "norm/beta"], lambda path: path)
    assert [name for name, _ in differ] == ["norm/gamma", "norm/beta"]


def test_blocks_that_differ_are_all_shown():
    paths = [f"stage{n}{x}_{part}/kernel" for n in range(40) for x in "ab" for part in ("in", "up")]
    assert [name for name, _ in shortened(paths, paths.index)] == paths


def test_what_is_alike_from_anywhere():
    paths = ["conv/kernel", "conv_1/kernel", "dense/kernel", "conv_2/kernel"]
    groups = families(paths, str, lambda path: "", kind_of)
    assert [(pattern, len(rows)) for pattern, rows in groups] == [
        ("conv*/kernel", 3),
        ("dense/kernel", 1),
    ]


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["a/b"], "a/b"),
        (["block1a_conv/k", "block1b_conv/k"], "block*_conv/k"),
        (["dense/k", "dense_1/k", "dense_12/k"], "dense*/k"),
        (["a_1/k", "b_1/k"], "*/k"),
        (["bn/gamma", "bn/beta"], "bn/{gamma, beta}"),
        (["bn_1/gamma", "bn_2/gamma", "bn_1/beta", "bn_2/beta"], "bn_*/{gamma, beta}"),
        ([f"a/{name}" for name in "abcdefgh"], "a/{a, b, c, d, e, f, 2 more}"),
        ([f"a/v_{n}" for n in range(9)], "a/v_*"),
    ],
)
def test_paths_that_differ_in_parts_share_a_pattern(paths, pattern):
    assert pattern_of(paths) == pattern
