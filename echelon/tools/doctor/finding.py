"""One finding of the doctor, as a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorFinding:
    sentence: str
    #: True: a job will fail or hang; False: a job may be slow, or fail later
    wrong: bool = False

    @property
    def mark(self) -> str:
        return "x" if self.wrong else "!"


def listed(words: list[str], most: int = 6) -> str:
    """Join words to a text such as ``a, b and 3 more``."""
    rest = len(words) - most
    return ", ".join(words) if rest <= 0 else f"{', '.join(words[:most])} and {rest} more"
