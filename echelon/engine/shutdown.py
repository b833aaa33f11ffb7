"""``ExitHook``: finishes a run's background work when its engine is closed, or else when the process exits."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

from echelon.base.console import say
from echelon.base.errors import EchelonError

#: Called with the uncaught exception that ends the process, or ``None``.
Finish = Callable[[BaseException | None], None]


class ExitHook:
    """Calls functions once, on request or at exit: the one added last is called first, and all are called."""

    def __init__(self) -> None:
        self._finishes: list[Finish] = []

    def add(self, finish: Finish) -> None:
        """Call ``finish`` before all handlers registered so far, because it may need what they close."""
        self._finishes.append(finish)
        self.renew()

    def renew(self) -> None:
        """Call the functions before all handlers that were registered meanwhile."""
        if self._finishes:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def now(self) -> None:
        atexit.unregister(self._at_exit)
        self._run(None)

    def _run(self, error: BaseException | None) -> None:
        finishes, self._finishes = self._finishes, []
        with contextlib.ExitStack() as stack:
            for finish in finishes:
                stack.callback(partial(finish, error))

    def _at_exit(self) -> None:
        try:
            self._run(getattr(sys, "last_value", None))
        except EchelonError as error:  # for example, the last checkpoint failed in the background
            say(str(error))
            sys.stdout.flush()
            os._exit(1)  # an exit handler has no other way to set the exit code
