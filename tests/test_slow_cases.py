"""The list of slow cases names tests that are there."""

import pathlib

HERE = pathlib.Path(__file__).parent


def test_the_list_is_of_tests_that_are_there():
    texts = {}
    for line in (HERE / "slow_cases.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        path = HERE.parent / file
        texts.setdefault(path, path.read_text())
        assert f"def {name.partition('[')[0]}(" in texts[path], line
