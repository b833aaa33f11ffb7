"""``threading`` and ``time`` on the scheduler: the classes and functions that code under simulation gets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from scheduler import Killed, Task, active, is_active

#: Unix time at which a life begins.
EPOCH = 1_800_000_000.0

Queue = list[tuple[Task, int]]


def _is_dead() -> bool:
    process = active().current.process
    return process is not None and process.dead


class SimulatedRLock:
    """A lock that its owner may take again."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._queue: Queue = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not is_active():
            return True
        scheduler = active()
        scheduler.pause()
        if self._owner is not scheduler.current:
            until = None if timeout is None or timeout < 0 else scheduler.now + timeout
            while self._owner is not None:
                left = None if until is None else until - scheduler.now
                if not blocking or (left is not None and left <= 0):
                    return False
                scheduler.block(self._queue, left)
            self._owner = scheduler.current
        self._depth += 1
        return True

    def release(self) -> None:
        if not is_active():
            return
        if self._owner is not active().current:
            if _is_dead():
                return
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            active().wake(self._queue, 1)

    def release_all(self) -> int:
        """Release every level and return their number."""
        depth, self._depth, self._owner = self._depth, 0, None
        active().wake(self._queue, 1)
        return depth

    def take_back(self, depth: int) -> None:
        while self._owner is not None:
            active().block(self._queue)
        self._owner, self._depth = active().current, depth

    def is_own(self) -> bool:
        return self._owner is active().current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedLock(SimulatedRLock):
    """A lock that its owner cannot take again, and that any task may release."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not is_active():
            return True
        scheduler = active()
        scheduler.pause()
        until = None if timeout is None or timeout < 0 else scheduler.now + timeout
        while self._owner is not None:
            left = None if until is None else until - scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            scheduler.block(self._queue, left)
        self._owner, self._depth = scheduler.current, 1
        return True

    def release(self) -> None:
        if is_active():
            self.release_all()

    def locked(self) -> bool:
        return self._owner is not None


class SimulatedCondition:
    """A condition variable."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock if lock is not None else SimulatedRLock()
        self._queue: Queue = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.release_all()
        woken = active().block(self._queue, timeout)
        self._lock.take_back(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else active().now + timeout
        while not (result := predicate()):
            left = None if until is None else until - active().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        if is_active():
            active().wake(self._queue, n)

    def notify_all(self) -> None:
        if is_active():
            active().wake(self._queue)


class SimulatedEvent:
    """A flag that tasks wait for."""

    def __init__(self) -> None:
        self._flag = False
        self._queue: Queue = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        if is_active():
            active().wake(self._queue)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        active().pause()
        if not self._flag:
            active().block(self._queue, timeout)
        return self._flag


class SimulatedSemaphore:
    """A counter of permits."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._queue: Queue = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        while self._value <= 0:
            if not blocking or not active().block(self._queue, timeout):
                return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        if is_active():
            active().wake(self._queue, n)


class SimulatedThread:
    """A thread of the process that creates it."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or f"thread-{next(self._numbers)}", bool(daemon)
        self.ident = self.native_id = next(self._numbers)
        self._task: Task | None = None

    def start(self) -> None:
        process = active().current.process
        self._task = active().spawn(process, self._guarded, self.name)
        self._task.thread = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def _guarded(self) -> None:
        try:
            self.run()
        except SystemExit:
            pass
        except Exception as error:  # as in a real process: the thread ends with a traceback, the process goes on
            active().log(f"thread {self.name} failed: {error!r}")

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.done:
            active().block(self._task.joining, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


_FOREIGN = SimulatedThread(name="main")


def _current_thread() -> SimulatedThread:
    return (active().current.thread if is_active() else None) or _FOREIGN


class ThreadingModule:
    """The part of ``threading`` that code under simulation uses."""

    Lock, RLock, Condition, Event = SimulatedLock, SimulatedRLock, SimulatedCondition, SimulatedEvent
    Semaphore = BoundedSemaphore = SimulatedSemaphore
    Thread = SimulatedThread
    current_thread = staticmethod(_current_thread)
    main_thread = staticmethod(lambda: None)
    get_ident = staticmethod(lambda: _current_thread().ident)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class TimeModule:
    """The part of ``time`` that code under simulation uses."""

    @staticmethod
    def monotonic() -> float:
        return active().now + 1000.0 if is_active() else time.monotonic()

    perf_counter = monotonic

    @staticmethod
    def time() -> float:
        if not is_active():
            return time.time()
        process = active().current.process
        return EPOCH + active().now + (process.clock_offset if process is not None else 0.0)

    @staticmethod
    def monotonic_ns() -> int:
        return int(TimeModule.monotonic() * 1e9)

    perf_counter_ns = monotonic_ns

    @staticmethod
    def time_ns() -> int:
        return int(TimeModule.time() * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        active().sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


__all__ = ["EPOCH", "Killed", "ThreadingModule", "TimeModule"]
