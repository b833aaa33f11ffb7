"""``ExitHook``: finishes an engine's background work when it is closed, or else when the process exits."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from echelon.base.console import say
from echelon.base.errors import EchelonError


class ExitHook:
    """Calls ``finish`` once, on request or at exit.

    finish: called with the uncaught exception that ends the process, or ``None``
    """

    def __init__(self, finish: Callable[[BaseException | None], None]) -> None:
        self._finish = finish
        atexit.register(self._at_exit)

    def comes_first(self) -> None:
        """Run at exit before all handlers registered so far, because ``finish`` needs what they close."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def now(self) -> None:
        atexit.unregister(self._at_exit)
        self._finish(None)

    def _at_exit(self) -> None:
        try:
            self._finish(getattr(sys, "last_value", None))
        except EchelonError as error:  # for example, the last checkpoint failed in the background
            say(str(error))
            sys.stdout.flush()
            os._exit(1)  # an exit handler has no other way to set the exit code
