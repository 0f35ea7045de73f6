"""Which failures are expected, which are Keras's own, and which are news."""

from collections.abc import Sequence
from dataclasses import dataclass

import exceptions
import suite

# Under these every failure is to be explained; the others are measured only.
OURS = ("ours", "ours-2d")


@dataclass(frozen=True)
class Verdict:
    """One package under one distribution.

    Attributes:
        package: A package of Keras's, or what else names the tests.
        distribution: A name of `plugin.DISTRIBUTIONS`.
        run: How many tests ran; skipped ones are not counted.
        skipped: How many Keras skips on this backend.
        expected: The failures that the list of exceptions holds.
        kerass: The failures that Keras has without any distribution, here.
        new: The failures that nobody has explained.
        healed: Ids of tests on the list that did not fail.
        seconds: The time all this took.
    """

    package: str
    distribution: str
    run: int
    skipped: int
    expected: tuple[suite.Outcome, ...]
    kerass: tuple[suite.Outcome, ...]
    new: tuple[suite.Outcome, ...]
    healed: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> int:
        """How many failed for any reason."""
        return len(self.expected) + len(self.kerass) + len(self.new)

    @property
    def good(self) -> bool:
        """Whether no failure is left to explain."""
        return not self.new

    def __str__(self):
        lines = [f"{self.package} under {self.distribution}:"]
        lines += [f"  NEW      {outcome}" for outcome in self.new]
        lines += [f"  Keras's  {outcome}" for outcome in self.kerass]
        lines += [f"  no longer fails: {test}" for test in self.healed]
        return "\n".join(lines) if len(lines) > 1 else ""


def judge(
    package: str,
    distribution: str,
    outcomes: Sequence[suite.Outcome],
    without: Sequence[suite.Outcome] = (),
    seconds: float = 0.0,
) -> Verdict:
    """Sorts outcomes under a distribution by those of the same tests without one."""
    broken = {outcome.id for outcome in without if outcome.failed}
    listed, failed = set(), []
    for outcome in outcomes:
        if exceptions.reason(outcome.id) and distribution in OURS:
            listed.add(outcome.id)
        if outcome.failed:
            failed.append(outcome)
    failing = {outcome.id for outcome in failed}
    ran = [outcome for outcome in outcomes if outcome.outcome != "skipped"]
    return Verdict(
        package,
        distribution,
        run=len(ran),
        skipped=len(outcomes) - len(ran),
        expected=tuple(o for o in failed if o.id in listed),
        kerass=tuple(o for o in failed if o.id not in listed and o.id in broken),
        new=tuple(o for o in failed if o.id not in listed and o.id not in broken),
        healed=tuple(o.id for o in ran if o.id in listed and o.id not in failing),
        seconds=seconds,
    )


def unexplained(outcomes: Sequence[suite.Outcome]) -> frozenset[str]:
    """The failures to be run again without a distribution: they may be Keras's own."""
    failed = (outcome.id for outcome in outcomes if outcome.failed)
    return frozenset(test for test in failed if not exceptions.reason(test))


def table(verdicts: Sequence[Verdict]) -> str:
    """Package by distribution: how many ran, failed, were expected, are Keras's, are new."""
    heads = ("run", "failed", "expected", "Keras's", "new", "healed", "skipped", "seconds")
    lines = [f"{'':12}{'':9}" + "".join(f"{head:>10}" for head in heads)]
    for v in verdicts:
        numbers = (v.run, v.failed, len(v.expected), len(v.kerass), len(v.new), len(v.healed))
        row = "".join(f"{number:10}" for number in (*numbers, v.skipped, round(v.seconds)))
        lines.append(f"{v.package:12}{v.distribution:9}{row}")
    return "\n".join(lines)
