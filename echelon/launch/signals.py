"""Signals to the launcher: each becomes an exception, but never in the middle of starting or ending processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.launch.worker import HELD_SIGNALS


def heed_signals() -> None:
    """As torch's agent does once ranks run, but from the start, and leaving alone what nohup set to be ignored."""
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in heeded:
        signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in heeded)


@contextmanager
def signals_held() -> Iterator[None]:
    """A second Ctrl-C must not break off the ending of the ranks, nor a first one their starting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))
