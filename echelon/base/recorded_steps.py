"""Parse the steps that a timeline records: ``5:10``, ``7``, or ``auto`` for some steps after the warm-up."""

from __future__ import annotations

import re
from typing import NamedTuple

from echelon.base.errors import UsageError

#: For ``auto``: steps to skip, and steps to record. The first steps compile, allocate and set up communication.
WARM_UP, COUNT = 10, 5
#: The value on a command line and in the environment that selects this default.
AFTER_WARM_UP = "auto"


class RecordedSteps(NamedTuple):
    """The range of recorded steps, from ``first`` to ``last`` inclusive."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def is_steps(text: str) -> bool:
    """Return True if an argument looks like steps, valid or not; a script after a bare ``--timeline`` does not."""
    return text == AFTER_WARM_UP or re.fullmatch(r"-?\d[\d:.,-]*", text) is not None


def check_steps(text: str, option: str) -> str:
    """Return ``text`` if it is a valid range of steps; ``option`` is its name for the error message.

    Raises UsageError if it is not valid.
    """
    parse_steps(text, option, 0)
    return text


def parse_steps(text: str, option: str, done: int) -> RecordedSteps:
    """Return the steps that ``text`` names, for a run that begins after ``done`` steps.

    Raises UsageError if ``text`` is not a valid range; ``option`` is its name for the message.
    """
    if text == AFTER_WARM_UP:
        return RecordedSteps(done + WARM_UP + 1, done + WARM_UP + COUNT)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"{option} '{text}' names no steps; write 5:10 (both included), or 7 for one")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1 or last < first:
        raise UsageError(f"{option} '{text}': steps count from 1, and the first comes before the last; write 5:10")
    return RecordedSteps(first, last)
