"""The main process, rank 0: work that it does first, or alone."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from echelon.base.errors import PeerLost, UsageError
from echelon.distributed import world as worlds

_DONE, _FAILED = "done", "failed"
_turns = itertools.count()  # all processes call in the same order, so the numbers agree


def is_main_process() -> bool:
    """Return True on rank 0, the process that prints and writes shared files."""
    return worlds.rank() == 0


@contextlib.contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """Run the body on rank 0 first and then on all others, which find on disk what rank 0 wrote.

    local: True if the first process of each host goes first, for disks that hosts do not share

    Other ranks wait without a limit, longer than ``init(timeout=)`` if necessary.

    >>> with echelon.main_process_first():
    ...     dataset = prepare()
    """
    world = worlds.current()
    if world.size == 1:
        yield
        return
    if world.control is None:
        raise UsageError(
            "main_process_first() was called by a worker that talks to parameter servers alone; call "
            "echelon.distributed.world.bind() before it"
        )
    goes_first = (worlds.local_rank() if local else world.rank) == 0
    key = f"main_process_first/{next(_turns)}/{worlds.node_rank() if local else 0}"
    if not goes_first:
        _wait_for(key, "the first process of this host" if local else "rank 0")
        yield
        return
    try:
        yield
    except BaseException:
        _get_default_store().set(key, _FAILED)
        raise
    _get_default_store().set(key, _DONE)


def _wait_for(key: str, first: str) -> None:
    store, pause = _get_default_store(), 0.005
    try:
        while not store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        ended = bytes(store.get(key)).decode()
    except dist.DistError:
        raise PeerLost(f"main_process_first(): {first} has exited; look at its log") from None
    if ended == _FAILED:
        raise PeerLost(f"main_process_first(): {first} failed, so the other processes stop too; look at its log")
