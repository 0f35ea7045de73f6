"""Random models with tables on meshes, by rows and by width, against one device.

    python tests/tables/drawn.py [--programs 100] [--seed N] [--only SEED ...] [--processes 2]
    python tests/tables/drawn.py --programs 20 --given tables=width model=tied

Each program runs in a process that is given up after a time; an abort and a hang are failures. A
seed that fails is named, and runs again by `--only SEED`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent)]

import drawing  # noqa: E402
from table_options import OPTIONS, drawn  # noqa: E402

WORKER = HERE / "table_worker.py"


def main() -> int:
    """Prints what is not right, and how many programs ran."""
    arguments = drawing.parser(__doc__.splitlines()[0], programs=100, timeout=240.0).parse_args()
    given = dict(drawing.option(text, OPTIONS) for text in arguments.given)
    programs = [drawn(seed, given) for seed in drawing.seeds(arguments)]
    words, code = drawing.run_as_asked(programs, WORKER, arguments)
    print(words)
    return code


if __name__ == "__main__":
    sys.exit(main())
