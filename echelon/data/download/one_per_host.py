"""``one_per_host``: one process of each host does some work while the others wait, without a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

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
    result: Future[None] = Future()
    if works := world.place.local_rank == 0:
        threading.Thread(target=_run, args=(work, result), name="echelon-download", daemon=True).start()
    pause = SHORTEST
    try:
        while True:
            own = _state(result, pause) if works else "done"
            states = gather_json(own, world.control)
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
        if works:
            wait([result], LONGEST)  # until the work sees ``stop``; a request that blocks ends with the process


def _run(work: Callable[[], None], result: Future[None]) -> None:
    try:
        work()
        result.set_result(None)
    except BaseException as error:  # _state() reports it to all ranks
        result.set_exception(error)


def _state(result: Future[None], patience: float) -> str | dict[str, str]:
    if not wait([result], patience).done:
        return "working"
    if (error := result.exception()) is None:
        return "done"
    kind = "usage" if isinstance(error, UsageError) else "data"
    return {kind: str(error) if isinstance(error, EchelonError) else f"{type(error).__name__}: {one_line(error)}"}


def _raise_first(states: list[str | dict[str, str]], world: World) -> None:
    for rank, state in enumerate(states):
        if isinstance(state, dict):
            ((kind, line),) = state.items()
            error = UsageError if kind == "usage" else DataError
            raise error(line if world.place.one_host else f"rank {rank}: {line}")
