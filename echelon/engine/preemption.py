"""Preemption: after SIGTERM or SIGUSR1 to some of the ranks, all ranks stop after the same step.

Signals reach ranks at different times, and possibly not all of them. The ranks agree through the rendezvous store:

1. A rank that received a signal sets ``requested``. A thread of every rank polls for it twice a second. Once it sees
   that, its rank reads the store after every step, and the thread increments ``ready``.
2. When all ranks are ready, rank 0 sets ``step``, the step to stop after: the one that rank 0 is about to begin. No
   rank can finish this step without rank 0, so every rank that has finished it finds its number in the store.

Without a signal, a step costs one comparison. Under local SGD, ranks stop after their next averaging step.
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

#: Signals that request a rank to save and exit.
ASKING = (signal.SIGTERM, signal.SIGUSR1)
#: Seconds between two polls for a request of another rank; longer with thousands of ranks, to limit store load.
INTERVAL, INTERVAL_PER_RANK = 0.5, 0.001

_numbers = itertools.count()  # numbers the engines of a process, equally on all ranks


class PreemptionHandler:
    """One rank's preemption signals; they have no effect before ``install``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._received_signal: str | None = None  # the signal that this rank received
        self._left = False
        self._checking = False  # True after a request: read the store after every step
        self._previous: dict[signal.Signals, Any] = {}
        self._requests: _PreemptionRequests | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def install(self) -> None:
        """Handle signals from now on, and poll for requests of other ranks.

        Call it in the main thread, where Python allows signal handlers.
        """
        self._requests = _PreemptionRequests(self._world) if self._world.control is not None else None
        self._set_handlers()
        if self._requests is not None:
            self._watcher = threading.Thread(target=self._watch, name="echelon-leave", daemon=True)
            self._watcher.start()

    def due(self, step: int, next_sync: Callable[[], int]) -> bool:
        """Return True if this rank must save and exit after ``step``, which it has just finished.

        next_sync: returns the next step that no rank can finish without rank 0
        """
        if self._requests is None:
            self._left = self._received_signal is not None
        elif self._checking:
            self._left = self._agreed_on(step, next_sync, self._requests)
        return self._left

    def _agreed_on(self, step: int, next_sync: Callable[[], int], requests: _PreemptionRequests) -> bool:
        if self._world.device.type == "cuda":  # the host may run ahead; a step is finished when the device is done
            torch.cuda.synchronize(self._world.device)
        chosen = requests.step()
        if chosen is None and self._world.rank == 0 and requests.all_ready():
            requests.stop_after(next_sync())
        return chosen == step

    def leave(self, step: int, saved_in: str | None, say: Callable[[str], None]) -> NoReturn:
        """Exit this process with code ``REQUEUE``; its state after ``step`` is saved."""
        kept = f"saved step {step} in {saved_in}" if saved_in else f"step {step} is in the launchers' memory"
        say(f"preempted by {self._reason}: {kept}; exit code {REQUEUE} requests a restart")
        raise SystemExit(REQUEUE)

    @property
    def _reason(self) -> str:
        """The name of the signal, received by any rank."""
        return self._received_signal or (self._requests.reason() if self._requests is not None else "")

    def close(self) -> None:
        """Restore the previous signal handlers. The mark file of a preempted rank stays, for the launcher."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join(timeout=5.0)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        if self._previous and not self._left and (mark := self._mark()) is not None:
            mark.unlink(missing_ok=True)
        self._previous = {}

    def _set_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # this rank still exits with the others
        for number in ASKING:
            self._previous[number] = signal.signal(number, self._note) or signal.SIG_DFL
        if (mark := self._mark()) is not None:
            mark.touch()

    def _mark(self) -> Path | None:
        directory = os.environ.get(LEAVE_MARK)
        return Path(directory) / f"rank-{self._world.rank}" if directory else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal. The handler may interrupt any code, so it takes no lock and does not communicate."""
        if os.getpid() != self._pid:  # a forked child process: the signal is for the child alone
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received_signal = signal.Signals(number).name
        other = getattr(self._previous.get(signal.Signals(number)), "__self__", None)
        if isinstance(other, PreemptionHandler):  # the handler of another engine in this process
            other._note(number, frame)

    def _watch(self) -> None:
        assert self._requests is not None
        has_notified = False
        try:
            while not self._over.wait(max(INTERVAL, INTERVAL_PER_RANK * self._world.size)):
                if self._received_signal is not None and not has_notified:
                    self._requests.ask(self._received_signal)
                    has_notified = True
                if self._requests.is_requested():
                    self._checking = True
                    self._requests.ready()
                    return
        except (RuntimeError, OSError):  # the store is gone and so is the job; collectives will fail on their own
            return


class _PreemptionRequests:
    """The keys in the store that all ranks share. No method waits for another rank."""

    def __init__(self, world: World) -> None:
        prefix = f"echelon/leave/{next(_numbers)}"
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._ranks = world.size

    def ask(self, reason: str) -> None:
        self._store.set("requested", reason)

    def is_requested(self) -> bool:
        return bool(self._store.check(["requested"]))

    def reason(self) -> str:
        return bytes(self._store.get("requested")).decode() if self.is_requested() else ""

    def ready(self) -> None:
        self._store.add("ready", 1)

    def all_ready(self) -> bool:
        return int(self._store.add("ready", 0)) == self._ranks

    def stop_after(self, step: int) -> None:
        self._store.set("step", str(step))

    def step(self) -> int | None:
        return int(self._store.get("step")) if self._store.check(["step"]) else None
