"""Checks with a time limit: a check that hangs or raises is recorded as failed, and the other checks go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: The result of a check as JSON values. A failed check leaves ``{FAILED: reason}``.
Facts = dict[str, Any]
FAILED = "failed"


class CheckFailed(Exception):
    """Raised if a check raised or timed out; the message says why."""


def run_bounded(check: Callable[[], T], seconds: float) -> T:
    """Return the result of ``check``. Raises ``CheckFailed`` if ``check`` raises or takes longer than ``seconds``.

    A check that hangs is left in its daemon thread.
    """
    found: list[T] = []
    broken: list[BaseException] = []

    def doing() -> None:
        try:
            found.append(check())
        except BaseException as error:
            broken.append(error)

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    if broken:
        raise CheckFailed(one_line(broken[0])) from broken[0]
    raise CheckFailed(f"did not end within {seconds:g} s")


def facts_of(check: Callable[[], Facts], seconds: float) -> Facts:
    """Return the result of ``check``, or ``{FAILED: reason}`` if it raises or takes longer than ``seconds``."""
    try:
        return run_bounded(check, seconds)
    except CheckFailed as failure:
        return {FAILED: str(failure)}


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
