"""Random programs on meshes against one device, until every pair of options has met.

    python tests/random_models/run.py [--programs 200] [--seed N] [--only SEED] [--processes 2]
    python tests/random_models/run.py --programs 20 --given trainer=replica model=deep

Each program runs in a process that is given up after a time; an abort and a hang are failures. A
seed that fails is named, and runs again by `--only SEED`.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import drawing  # noqa: E402
from options import DETAILS, OPTIONS, all_pairs, covering, drawn, pairs_of  # noqa: E402

WORKER = Path(__file__).with_name("worker.py")
_OPTIONS = {**{name: each for of in DETAILS.values() for name, each in of.items()}, **OPTIONS}


def main() -> int:
    """Prints what is not right, how many programs ran and how many pairs of options met."""
    parser = drawing.parser(__doc__.splitlines()[0], programs=200, timeout=180.0)
    parser.add_argument("--pairs-of-these", action="store_true", help="add none for the pairs")
    arguments = parser.parse_args()
    given = dict(drawing.option(text, _OPTIONS) for text in arguments.given)
    programs = [drawn(seed, given) for seed in drawing.seeds(arguments)]
    if not (arguments.only or arguments.pairs_of_these or given):
        programs = covering(programs, arguments.seed + arguments.programs)
    words, code = drawing.run_as_asked(programs, WORKER, arguments)
    pairs = set().union(*map(pairs_of, programs)) & all_pairs()
    print(f"{words}; {len(pairs)} of {len(all_pairs())} pairs of options")
    return code


if __name__ == "__main__":
    sys.exit(main())
