"""Signals to the launcher: each becomes an exception, but never in the middle of starting or ending processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.distributed.rank_main import HELD_SIGNALS

#: Schedulers announce by these that the job must go soon.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopNotice:
    """While it is heeded, the first of ``LEAVE_SIGNALS`` is only noted here; the second is an exception like others."""

    def __init__(self) -> None:
        self.given: signal.Signals | None = None

    @contextmanager
    def heeded(self) -> Iterator[None]:
        _notices.append(self)
        try:
            yield
        finally:
            _notices.remove(self)


_notices: list[StopNotice] = []


def install_launcher_signal_handlers() -> None:
    """As torch's agent does once ranks run, but from the start, and leaving alone what nohup set to be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torch's agent puts its own handlers in place of ours


@contextmanager
def signals_held() -> Iterator[None]:
    """A second Ctrl-C must not break off the ending of the ranks, nor a first one their starting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(number: int, frame: FrameType | None) -> None:
    if number in LEAVE_SIGNALS and _notices and _notices[-1].given is None:
        _notices[-1].given = signal.Signals(number)
        return
    raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))
