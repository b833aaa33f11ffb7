"""A deterministic scheduler: real threads of which one runs at a time, on a simulated clock.

Code under simulation uses ``threading`` and ``time`` as always; ``interposition.py`` puts the classes and functions of
this module in their place. Every lock, wait, sleep, disk operation and message is a point at which the scheduler may
let another task go on. All choices come from one random generator, so a seed replays a life to the last bit. Time moves
only when no task can run: then it jumps to the next timer.
"""

from __future__ import annotations

import _thread
import heapq
import io
import itertools
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Real seconds after which a task that does not come back is taken for a hang outside the simulation.
STUCK = 120.0


class Killed(BaseException):
    """The process of this task is dead; the task unwinds without any effect."""


class SimulationError(AssertionError):
    """A law of the simulation does not hold."""


class SimulatedProcess:
    """A process: tasks that die together, a wall clock of its own, and values of module globals of its own.

    host:    name of the machine, which owns a disk and a place in the network
    ending:  exception or exit code with which the main task ended; None while it runs or after a kill
    """

    def __init__(self, name: str, host: str, pid: int, parent: int = 1) -> None:
        self.name, self.host, self.pid, self.parent = name, host, pid, parent
        self.tasks: list[Task] = []
        self.dead = self.stopped = False
        self.clock_offset = 0.0
        self.ending: object = None
        self.module_globals: dict[tuple[Any, str], Any] = {}
        self.environment: dict[str, str] = {}
        self.main: Task | None = None  #: the task that handles signals
        self.signals: list[int] = []  #: those that have come and are not handled yet
        self.holds_signals = False
        self.on_signal: Callable[[int], None] = lambda number: None

    def __repr__(self) -> str:
        return self.name


class Task:
    """One thread of a simulated process. It runs while it holds its baton."""

    def __init__(self, process: SimulatedProcess | None, name: str) -> None:
        self.process, self.name = process, name
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.epoch = 0  #: counts the waits, so that a timer or a queue of an earlier wait is recognized
        self.woken = self.blocked = self.done = self.interrupted = False
        self.joining: list[tuple[Task, int]] = []
        self.thread: Any = None
        self.ident = 0


class Scheduler:
    """The tasks of one life. The thread that creates it is its first task, the director."""

    def __init__(self, rng: random.Random, *, restless: float = 0.2) -> None:
        self.rng, self.restless = rng, restless
        self.now = 0.0
        self.switches = 0
        self.director = self.current = Task(None, "director")
        self.failure: BaseException | None = None
        self.trace: list[str] = []
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = itertools.count()
        self.on_switch: Callable[[SimulatedProcess | None, SimulatedProcess | None], None] = lambda old, new: None

    def log(self, line: str) -> None:
        who = self.current.process.name if self.current.process else "director"
        self.trace.append(f"{self.now:9.3f} {who}: {line}")

    # ---- tasks ----

    def spawn(self, process: SimulatedProcess | None, call: Callable[[], Any], name: str) -> Task:
        """Start a task, which first runs when the scheduler chooses it."""
        task = Task(process, name)
        if process is not None:
            process.tasks.append(task)
        _thread.start_new_thread(self._run, (task, call))
        self._ready.append(task)
        return task

    def _run(self, task: Task, call: Callable[[], Any]) -> None:
        task.ident = _thread.get_ident()
        task.baton.acquire()
        try:
            self._check_alive()
            call()
        except Killed:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        task.done = True
        if task.process is not None and task in task.process.tasks:
            task.process.tasks.remove(task)
        for waiter, epoch in task.joining:
            self._rouse(waiter, epoch)
        self._hand_over(self._next())

    def kill(self, process: SimulatedProcess) -> None:
        """End a process at once; its tasks unwind without effect when they are next chosen."""
        process.dead, process.stopped = True, False
        for task in process.tasks:
            if task.blocked:
                self._rouse(task, task.epoch)

    def signal(self, process: SimulatedProcess, number: int) -> None:
        """Let the process's main task handle a signal, at once even if it waits."""
        process.signals.append(number)
        if process.main is not None and process.main.blocked and not process.holds_signals:
            process.main.interrupted = True
            self._rouse(process.main, process.main.epoch)

    # ---- scheduling points ----

    def pause(self) -> None:
        """Let another task go on, or not."""
        self._check_alive()
        if self._ready and self.rng.random() < self.restless:
            self._ready.append(self.current)
            self._switch()

    def block(self, queue: list[tuple[Task, int]] | None = None, timeout: float | None = None) -> bool:
        """Wait until another task wakes this one from ``queue``; return False if the time was up first."""
        self._check_alive()
        task, until = self.current, None if timeout is None else self.now + max(0.0, timeout)
        while True:
            task.epoch += 1
            task.woken, task.blocked, task.interrupted = False, True, False
            if queue is not None:
                queue.append((task, task.epoch))
            if until is not None:
                heapq.heappush(self._timers, (until, next(self._numbers), task, task.epoch))
            self._switch()
            if not task.interrupted:  # else the signal's handler has returned, and the wait goes on
                return task.woken

    def sleep(self, seconds: float) -> None:
        self.block(timeout=seconds)

    def wake(self, queue: list[tuple[Task, int]], count: int | None = None) -> None:
        """Wake tasks that wait in ``queue``: all of them, or the first ``count``."""
        while queue and count != 0:
            task, epoch = queue.pop(0)
            if self._rouse(task, epoch) and count is not None:
                count -= 1

    def _rouse(self, task: Task, epoch: int) -> bool:
        if task.done or not task.blocked or task.epoch != epoch:
            return False
        task.woken, task.blocked = True, False
        self._ready.append(task)
        return True

    def _switch(self) -> None:
        task, chosen = self.current, self._next()
        if chosen is not task:
            self._hand_over(chosen)
            if not task.baton.acquire(True, STUCK):
                raise SimulationError(f"task {task.name} has waited {STUCK:g} real seconds: a task is stuck")
        if task is self.director and self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self._check_alive()

    def _hand_over(self, chosen: Task) -> None:
        old, self.current = self.current, chosen
        if old.process is not chosen.process:
            self.on_switch(old.process, chosen.process)
        self.switches += 1
        chosen.baton.release()

    def _next(self) -> Task:
        if self.failure is not None and self.current is not self.director:
            self._withdraw(self.director)
            return self.director
        while True:
            able = [at for at, task in enumerate(self._ready) if task.process is None or not task.process.stopped]
            if able:
                return self._ready.pop(able[self.rng.randrange(len(able))] if len(able) > 1 else able[0])
            if not self._advance():
                self.failure = SimulationError("deadlock: no task can run and no timer is set")
                self._withdraw(self.director)
                return self.director

    def _withdraw(self, task: Task) -> None:
        task.blocked = False
        if task in self._ready:
            self._ready.remove(task)

    def _advance(self) -> bool:
        """Move the clock to the next timer and make its task ready; return False if there is none."""
        while self._timers:
            due, _, task, epoch = heapq.heappop(self._timers)
            if task.blocked and task.epoch == epoch and not task.done:
                self.now = max(self.now, due)
                task.blocked = False
                self._ready.append(task)
                return True
        return False

    def _check_alive(self) -> None:
        process = self.current.process
        if process is None:
            return
        if process.dead:
            raise Killed
        if process.signals and process.main is self.current and not process.holds_signals:
            process.on_signal(process.signals.pop(0))

    def stacks(self, processes: list[SimulatedProcess]) -> list[str]:
        """Return the innermost calls of every task, to see what it waits for."""
        frames, lines = sys._current_frames(), []
        for process in processes:
            for task in process.tasks:
                found = traceback.extract_stack(frames[task.ident]) if task.ident in frames else []
                calls = [
                    f"{Path(at.filename).name}:{at.lineno} {at.name}"
                    for at in found
                    if "tests/simulation" not in at.filename
                ]
                lines.append(f"{process}, {task.name}: {' > '.join(calls[-5:])}")
        return lines

    # ---- the end of a life ----

    def finish(self, processes: list[SimulatedProcess], kill: Callable[[SimulatedProcess], None]) -> None:
        """Kill all processes by ``kill``, and let their tasks unwind."""
        self.failure = None
        for process in processes:
            kill(process)
        for _ in range(100_000):
            if not any(process.tasks for process in processes):
                return
            self.sleep(0.0)
        raise SimulationError("tasks of dead processes do not end")


_active: list[Scheduler] = []


def active() -> Scheduler:
    """Return the scheduler of the present life."""
    return _active[-1]


def activate(scheduler: Scheduler | None) -> None:
    _active[:] = [scheduler] if scheduler is not None else []


def is_active() -> bool:
    return bool(_active)


class TraceStream(io.TextIOBase):
    """The standard streams of all processes: lines go into the trace."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def write(self, text: str) -> int:
        if text.strip():
            self._scheduler.log(text.strip())
        return len(text)
