"""Ending: what an engine has to finish, when it is closed or else when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from echelon.base.errors import EchelonError


class ExitHook:
    """``finish`` is told what the process ends with: an error that nobody caught, or ``None``."""

    def __init__(self, finish: Callable[[BaseException | None], None]) -> None:
        self._finish = finish
        atexit.register(self._at_exit)

    def comes_first(self) -> None:
        """At exit, before those who have registered until now: what they end is still needed to finish."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def now(self) -> None:
        atexit.unregister(self._at_exit)
        self._finish(None)

    def _at_exit(self) -> None:
        try:
            self._finish(getattr(sys, "last_value", None))
        except EchelonError as error:  # the last checkpoint failed in the background, say
            print(f"echelon: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # an exit handler has no other way to say that the run did not end well
