"""Checks of command-line options, with one wording for every command."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.base.errors import UsageError


def at_least(least: int, option: str, value: int | None) -> None:
    """Raise UsageError if a value is given and is below ``least``."""
    if value is not None and value < least:
        raise UsageError(f"{option} {value}: expected {least} or more")


def require_one_of(option: str, value: object, known: Sequence[object]) -> None:
    """Raise UsageError if a value is given and is not one of ``known``."""
    if value is not None and value not in known:
        *most, last = map(str, known)
        raise UsageError(f"{option} {value}: expected {', '.join(most)} or {last}")
