"""``one_per_host``: one process of each host does some work while the others wait, without a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from echelon.base.errors import DataError, EchelonError, PeerLost, UsageError, one_line
from echelon.distributed.world import World

#: Seconds between two rounds. They are shorter than any timeout, so that a wait of hours causes none.
SHORTEST, LONGEST = 0.01, 2.0


def one_per_host(world: World, work: Callable[[], None], stop: threading.Event) -> None:
    """Run ``work`` on local rank 0 of every host; return on all ranks when all hosts are done.

    If one fails, all ranks raise its error, and ``stop`` is set for the others. The ranks exchange states in rounds
    while the work runs in a thread: a rank that died is detected within a round, not after the timeout of a collective.
    """
    from echelon.distributed.collectives import gather_json

    assert world.control is not None
    working = _Working(work) if world.place.local_rank == 0 else None
    pause = SHORTEST
    try:
        while True:
            mine = working.state(pause) if working else "done"
            states = gather_json(mine, world.control)
            _raise_first(states, world)
            if all(state == "done" for state in states):
                return
            pause = min(pause * 1.5, LONGEST, world.timeout / 4)
    except RuntimeError as error:
        raise PeerLost(
            f"fetching data: rank {world.rank} lost contact with another rank ({one_line(error)}); look at its log"
        ) from error
    finally:
        stop.set()
        if working:
            working.join()


class _Working:
    """The work in its thread, and its result."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-download", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # state() reports it to all ranks
            self._error = error

    def state(self, patience: float) -> str | dict[str, str]:
        self._thread.join(patience)
        if self._thread.is_alive():
            return "working"
        if self._error is None:
            return "done"
        ours = isinstance(self._error, EchelonError)
        kind = "usage" if isinstance(self._error, UsageError) else "data"
        return {kind: str(self._error) if ours else f"{type(self._error).__name__}: {one_line(self._error)}"}

    def join(self) -> None:
        """Wait until the work has seen ``stop``. If it is blocked in a request, its thread ends with the process."""
        self._thread.join(LONGEST)


def _raise_first(states: list[str | dict[str, str]], world: World) -> None:
    for rank, state in enumerate(states):
        if isinstance(state, dict):
            ((kind, line),) = state.items()
            error = UsageError if kind == "usage" else DataError
            raise error(line if world.place.one_host else f"rank {rank}: {line}")
