"""Parse ``--timeline`` on a command line, with or without steps."""

from __future__ import annotations

from echelon.base.recorded_steps import AFTER_WARM_UP, is_steps

OPTION = "--timeline"


def with_steps(words: list[str], valued: set[str]) -> list[str]:
    """Return the arguments with the default steps inserted after a bare ``--timeline``; arguments of the script stay.

    valued: options that take a value
    """
    found, at = list(words), 0
    while at < len(found) and found[at].startswith("-") and found[at] != "--":
        if found[at] == OPTION and not (at + 1 < len(found) and is_steps(found[at + 1])):
            found.insert(at + 1, AFTER_WARM_UP)
        at += 2 if found[at] in valued else 1
    return found
