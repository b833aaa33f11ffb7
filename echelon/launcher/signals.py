"""Signals to the launcher: each raises an exception, but never while processes are being started or ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.distributed.rank_main import HELD_SIGNALS

#: Signals by which schedulers announce preemption.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopNotice:
    """Records the first of ``LEAVE_SIGNALS`` while it is active; the second raises an exception like other signals."""

    def __init__(self) -> None:
        self.given: signal.Signals | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        _notices.append(self)
        try:
            yield
        finally:
            _notices.remove(self)


_notices: list[StopNotice] = []


def install_launcher_signal_handlers() -> None:
    """Install handlers as torch's agent does once ranks run, but at once, and not for signals that nohup ignores."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # otherwise torch's agent would replace these handlers


@contextmanager
def signals_held() -> Iterator[None]:
    """Block signals, so that Ctrl-C interrupts neither the start nor the end of ranks."""
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
