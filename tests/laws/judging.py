"""Judges a case of any kind, from plain values."""

from typing import Any

from . import cases, interrupted


def compared(job: dict[str, Any]) -> dict[str, Any]:
    """Whether a case changed nothing, and the difference."""
    if job.get("law") == "interrupted":
        return interrupted.compared(interrupted.Interrupted.of(job))
    return cases.compared(cases.Case.of(job))
