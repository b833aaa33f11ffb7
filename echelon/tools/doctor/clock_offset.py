"""Measurement of the clock offset between a host and the first host, through the store that both use."""

from __future__ import annotations

import time
from collections.abc import Iterable

from echelon.tools.doctor.bounded_check import Facts
from echelon.tools.doctor.store_messages import MessageStore

_ROUNDS, _PATIENCE = 6, 10.0


def answer_all(board: MessageStore, hosts: Iterable[int]) -> None:
    """Answer the time requests of all other hosts in turn, on the first host."""
    for host in hosts:
        for turn in range(_ROUNDS):
            hear = board.soon if turn else board.get
            if hear(f"clock/{host}/{turn}/asked", _PATIENCE) is None:
                break
            board.put(f"clock/{host}/{turn}/told", time.time())


def ask(board: MessageStore, host: int, patience: float) -> Facts:
    """Return the seconds by which this host's clock is ``ahead`` of the first host's.

    The uncertainty ``within`` is half of the quickest round trip.
    """
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
    """Return (uncertainty, seconds ahead): the answer was given at some time during the round trip."""
    return trip / 2, asked + trip / 2 - told
