"""How far a host's clock is from the first host's, measured through the store both of them use."""

from __future__ import annotations

import time
from collections.abc import Iterable

from echelon.tools.doctor.bounded_check import Facts
from echelon.tools.doctor.store_messages import MessageStore

_ROUNDS, _PATIENCE = 6, 10.0


def answer_all(board: MessageStore, hosts: Iterable[int]) -> None:
    """The first host's side: tells the time to each of the others in turn."""
    for host in hosts:
        for turn in range(_ROUNDS):
            hear = board.soon if turn else board.get
            if hear(f"clock/{host}/{turn}/asked", _PATIENCE) is None:
                break
            board.put(f"clock/{host}/{turn}/told", time.time())


def ask(board: MessageStore, host: int, patience: float) -> Facts:
    """Seconds by which our clock is ahead, give or take ``within``: half of the quickest round trip."""
    found: list[tuple[float, float]] = []
    for turn in range(_ROUNDS):
        start, since = time.time(), time.perf_counter()
        board.put(f"clock/{host}/{turn}/asked", True)
        told = (
            board.soon(f"clock/{host}/{turn}/told", _PATIENCE)
            if turn
            else board.get(f"clock/{host}/{turn}/told", patience)
        )
        if told is None:
            return {"failed": "the first host did not tell the time"}
        found.append(offset(start, time.perf_counter() - since, float(told)))
    within, ahead = min(found)
    return {"ahead": ahead, "within": within}


def offset(asked: float, trip: float, told: float) -> tuple[float, float]:
    """(Uncertainty, how far we are ahead): the answer was given somewhere between asking and hearing it."""
    return trip / 2, asked + trip / 2 - told
