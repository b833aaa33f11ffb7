"""Leaving when asked: SIGTERM or SIGUSR1 reaches some of the ranks, and all of them stop after the same step.

Signals come to ranks at different times, and perhaps not to all. Through the store in which the ranks met:

1. A rank that was asked says so (``asked``). A thread of every rank looks for that twice a second; once it sees it, its
   rank looks into the store after every step, and the thread says that it will (``ready``).
2. When all are ready, rank 0 names the step to stop after (``step``): the one that it is about to begin. Nobody can
   finish that one without rank 0, so everybody who has finished it finds its number in the store.

As long as nobody asks, a step pays for one comparison. Where ranks step alone (localsgd), it is their next meeting that
they stop after.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from echelon.base.environment import LEAVE_MARK, REQUEUE
from echelon.distributed.world import World

#: Signals that ask a rank to save and leave.
ASKING = (signal.SIGTERM, signal.SIGUSR1)
#: Seconds between two looks for a request of another rank; with thousands of ranks more, to spare the store.
INTERVAL, INTERVAL_PER_RANK = 0.5, 0.001

_numbers = itertools.count()  # tells apart the engines of one process, alike on all ranks


class PreemptionHandler:
    """What one rank knows of requests to leave. Made in the main thread, where Python allows to handle signals."""

    def __init__(self, world: World, name: int) -> None:
        """name: the rank's number in the job, where ``world`` is this process alone (workers of servers)"""
        self._world, self._name = world, name
        self._pid = os.getpid()
        self._asked: str | None = None  # the signal that reached this rank
        self._left = False
        self._checking = False  # another rank was asked: look into the store after every step
        self._previous: dict[signal.Signals, Any] = {}
        self._requests = _PreemptionRequests(world) if world.control is not None else None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._install()
        if self._requests is not None:
            self._watcher = threading.Thread(target=self._watch, name="echelon-leave", daemon=True)
            self._watcher.start()

    def due(self, step: int, next_meeting: Callable[[], int]) -> bool:
        """Whether to save and leave after ``step``, which has just been done.

        next_meeting: the first step from here on that nobody can finish without rank 0
        """
        if self._requests is None:
            self._left = self._asked is not None
        elif self._checking:
            self._left = self._agreed_on(step, next_meeting, self._requests)
        return self._left

    def _agreed_on(self, step: int, next_meeting: Callable[[], int], requests: _PreemptionRequests) -> bool:
        if self._world.device.type == "cuda":  # this rank's host may be ahead: what it has not done is not finished
            torch.cuda.synchronize(self._world.device)
        chosen = requests.step()
        if chosen is None and self._world.rank == 0 and requests.all_ready():
            requests.stop_after(next_meeting())
        return chosen == step

    def leave(self, step: int, saved_in: str | None, say: Callable[[str], None]) -> NoReturn:
        """End this process, whose state after ``step`` is kept."""
        kept = f"saved step {step} in {saved_in}" if saved_in else f"step {step} is in the launchers' memory"
        say(f"asked to end by {self._reason}: {kept}; exit code {REQUEUE} asks to be started again")
        raise SystemExit(REQUEUE)

    @property
    def _reason(self) -> str:
        """The name of the signal, whichever rank it reached."""
        return self._asked or (self._requests.reason() if self._requests is not None else "")

    def close(self) -> None:
        """Signals mean what they meant before. The mark of a rank that has left stays: the launcher looks for it."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join(timeout=5.0)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        if self._previous and not self._left and (mark := self._mark()) is not None:
            mark.unlink(missing_ok=True)
        self._previous = {}

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # it still leaves with the others
        for number in ASKING:
            self._previous[number] = signal.signal(number, self._note) or signal.SIG_DFL
        if (mark := self._mark()) is not None:
            mark.touch()

    def _mark(self) -> Path | None:
        directory = os.environ.get(LEAVE_MARK)
        return Path(directory) / f"rank-{self._name}" if directory else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. It may interrupt anything, so it takes no lock and talks to nobody."""
        if os.getpid() != self._pid:  # a process that was forked from this one: the request is its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._asked = signal.Signals(number).name
        other = getattr(self._previous.get(signal.Signals(number)), "__self__", None)
        if isinstance(other, PreemptionHandler):  # of another engine in this process
            other._note(number, frame)

    def _watch(self) -> None:
        assert self._requests is not None
        told = False
        try:
            while not self._over.wait(max(INTERVAL, INTERVAL_PER_RANK * self._world.size)):
                if self._asked is not None and not told:
                    self._requests.ask(self._asked)
                    told = True
                if self._requests.asked():
                    self._checking = True
                    self._requests.ready()
                    return
        except (RuntimeError, OSError):  # the store is gone and with it the job; the ranks find out by themselves
            return


class _PreemptionRequests:
    """The ranks' common notes. Nothing here waits for another rank."""

    def __init__(self, world: World) -> None:
        prefix = f"echelon/leave/{next(_numbers)}"
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._ranks = world.size

    def ask(self, reason: str) -> None:
        self._store.set("asked", reason)

    def asked(self) -> bool:
        return bool(self._store.check(["asked"]))

    def reason(self) -> str:
        return bytes(self._store.get("asked")).decode() if self.asked() else ""

    def ready(self) -> None:
        self._store.add("ready", 1)

    def all_ready(self) -> bool:
        return int(self._store.add("ready", 0)) == self._ranks

    def stop_after(self, step: int) -> None:
        self._store.set("step", str(step))

    def step(self) -> int | None:
        return int(self._store.get("step")) if self._store.check(["step"]) else None
