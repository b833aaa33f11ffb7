"""``--timeline`` on a command line: with steps behind it, or without."""

from __future__ import annotations

from echelon.strategy.recorded_steps import AFTER_WARM_UP, is_steps

OPTION = "--timeline"


def with_steps(words: list[str], valued: set[str]) -> list[str]:
    """The same words with the steps that a bare ``--timeline`` stands for; the script's own words are left alone.

    valued: the options that take a value
    """
    found, at = list(words), 0
    while at < len(found) and found[at].startswith("-") and found[at] != "--":
        if found[at] == OPTION and not (at + 1 < len(found) and is_steps(found[at + 1])):
            found.insert(at + 1, AFTER_WARM_UP)
        at += 2 if found[at] in valued else 1
    return found
