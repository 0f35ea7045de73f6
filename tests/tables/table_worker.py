"""Runs programs with tables: a line of JSON in, a line out."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "conformance"), str(HERE), str(HERE.parent)]

import serving  # first: it chooses the devices  # noqa: E402

# isort: split
from comparing import compared, gap  # noqa: E402
from drawing import Program  # noqa: E402
from table_programs import results_of  # noqa: E402


def difference(program: Program) -> tuple[float, str]:
    """The largest difference between a mesh and one device, where, and how tables were used."""
    expected, found = results_of(program, False), results_of(program, True)
    assert found.keys() == expected.keys(), f"{list(found)} and {list(expected)}"
    used = {path: words for name in found if "uses" in name for path, words in found[name].items()}
    gaps = {n: gap(found[n], expected[n]) for n in expected if "uses" not in n}
    name = max(gaps, key=gaps.get)
    words = "; ".join(f"{path} {words.split(':')[0]}" for path, words in used.items())
    return gaps[name], f"{name} [{words}]"


if __name__ == "__main__":
    serving.serve(lambda job: compared(Program(job["seed"], job["choices"]), difference))
