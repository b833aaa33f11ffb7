"""Which steps of a run are recorded: ``5:10``, ``7``, or nothing but the wish, which means some after the warm-up."""

from __future__ import annotations

import re
from typing import NamedTuple

from echelon.base.errors import UsageError

#: Without steps named: how many to let pass, and how many to record. The first steps compile, allocate and meet.
WARM_UP, COUNT = 10, 5
#: What stands for that on a command line and in the environment.
AFTER_WARM_UP = "auto"


class RecordedSteps(NamedTuple):
    """``first`` to ``last``, both recorded."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def is_steps(text: str) -> bool:
    """Whether a word looks like steps, right or wrong; so that a script after a bare ``--timeline`` is not taken."""
    return text == AFTER_WARM_UP or re.fullmatch(r"-?\d[\d:.,-]*", text) is not None


def check_steps(text: str, asked_by: str) -> str:
    """``text`` itself, when it names steps; ``asked_by`` is what the user wrote it after."""
    parse_steps(text, asked_by, 0)
    return text


def parse_steps(text: str, asked_by: str, done: int) -> RecordedSteps:
    """The steps that ``text`` names, for a run that begins after ``done`` steps."""
    if text == AFTER_WARM_UP:
        return RecordedSteps(done + WARM_UP + 1, done + WARM_UP + COUNT)
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise UsageError(f"{asked_by} '{text}' names no steps; write 5:10 (both included), or 7 for one")
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 1 or last < first:
        raise UsageError(f"{asked_by} '{text}': steps count from 1, and the first comes before the last; write 5:10")
    return RecordedSteps(first, last)
