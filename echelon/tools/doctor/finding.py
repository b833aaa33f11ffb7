"""One thing to look at, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorFinding:
    sentence: str
    #: a job will fail or hang by it; without it, a job may be slow, or fail later
    wrong: bool = False

    @property
    def mark(self) -> str:
        return "x" if self.wrong else "!"


def listed(words: list[str], most: int = 6) -> str:
    """``a, b and 3 more``."""
    rest = len(words) - most
    return ", ".join(words) if rest <= 0 else f"{', '.join(words[:most])} and {rest} more"
