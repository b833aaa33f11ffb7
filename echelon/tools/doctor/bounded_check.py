"""A check that hangs or breaks is a fact of its own, and the other checks go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: What a check has found, as JSON has it. A check that came to nothing leaves ``{FAILED: why}``.
Facts = dict[str, Any]
FAILED = "failed"


class CheckFailed(Exception):
    """The check came to nothing; its message says why."""


def run_bounded(check: Callable[[], T], seconds: float) -> T:
    """What ``check`` returns, within ``seconds``; else ``CheckFailed``. One that hangs is left behind in its thread."""
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
    """As ``run_bounded``, with the failure as a fact."""
    try:
        return run_bounded(check, seconds)
    except CheckFailed as failure:
        return {FAILED: str(failure)}


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
