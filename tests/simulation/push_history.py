"""The history of a job's pushes, and the laws that the servers' final state must obey. It knows no code of Echelon.

Every push adds -12 / (workers of the step) to a row that no other push touches, one such row on each server, and to
rows and dense entries that all pushes share. So the final rows alone tell how often each push counted, on which
servers, and with how many workers: all numbers are whole, because 12 is divisible by 1 to 4.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: Gradient of every push.
AMOUNT = 12


class Push(NamedTuple):
    """A push of a worker. ``epoch`` counts the worker's entries into the job."""

    worker: int
    epoch: int
    seq: int


@dataclass
class PushHistory:
    """The pushes that workers have sent, and the servers that have answered each.

    mode:     "sync" or "async"
    own_ids:  by server, ids that belong to it, in the order of their use
    """

    mode: str
    servers: int
    own_ids: list[list[int]]
    sent: dict[Push, list[int]] = field(default_factory=dict)  # the id of the push on each server
    answered: dict[Push, set[int]] = field(default_factory=lambda: defaultdict(set))
    dropped: set[tuple[int, int]] = field(default_factory=set)  # (worker, epoch)

    def ids_of(self, push: Push) -> list[int]:
        """Return the push's own id on each server; the same whenever the push is sent again."""
        if push not in self.sent:
            self.sent[push] = [ids.pop() for ids in self.own_ids]
        return self.sent[push]


def find_violations(
    history: PushHistory, own_rows: list[dict[int, float]], shared: list[float], dense: list[float], steps: int
) -> list[str]:
    """Return the laws that the final state breaks.

    own_rows:  by server, the value of each push's own row
    shared:    by server, the value of the row that all pushes change
    dense:     by server, the value of its dense entries
    steps:     number of steps of a finished job
    """
    found: list[str] = []
    counted: dict[Push, list[float]] = {}
    for push, ids in history.sent.items():
        counted[push] = [-own_rows[server][ids[server]] / AMOUNT for server in range(history.servers)]
        found += _check_push(history, push, counted[push])
    if history.mode == "sync":
        found += _check_steps(history, counted, steps)
    for server in range(history.servers):
        total = sum(np.float64(values[server]) for values in counted.values())
        for name, value in (("shared row", shared[server]), ("dense entries", dense[server])):
            if abs(-value / AMOUNT - total) > 1e-3:
                found.append(f"server {server}: {name} have {-value / AMOUNT:g} pushes, own rows {total:g}")
    return found


def _check_push(history: PushHistory, push: Push, counts: list[float]) -> list[str]:
    found = []
    for server, count in enumerate(counts):
        where = f"{push} on server {server}"
        if history.mode == "async" and count not in (0.0, 1.0):
            found.append(f"{where} counts {count:g} times")
        if count > 1.0 + 1e-6:
            found.append(f"{where} counts {count:g} times")
        is_dropped = (push.worker, push.epoch) in history.dropped
        kept = not is_dropped or (
            server in history.answered[push] and (history.mode == "async" or history.servers == 1)
        )
        if not count and kept:
            answered = "was answered" if server in history.answered[push] else "is behind its worker, who finished,"
            found.append(f"{where} {answered} and does not count")
    return found


def _check_steps(history: PushHistory, counted: dict[Push, list[float]], steps: int) -> list[str]:
    """Check that each step has the same members on all servers, each with its share."""
    found = []
    members: dict[int, list[set[Push]]] = defaultdict(lambda: [set() for _ in range(history.servers)])
    for push, counts in counted.items():
        for server, count in enumerate(counts):
            if count:
                members[push.seq][server].add(push)
    for step in range(steps):
        present = members[step]
        if any(group != present[0] for group in present):
            found.append(f"step {step} has other members on each server: {present}")
        for server, group in enumerate(present):
            share = 1 / len(group) if group else 0.0
            if not group and history.dropped:
                continue  # every worker was dropped: the step was left out
            if not group or any(abs(counted[push][server] - share) > 1e-6 for push in group):
                shares = {push: counted[push][server] for push in group}
                found.append(f"step {step} on server {server}: shares {shares}")
            if len({push.worker for push in group}) != len(group):
                found.append(f"step {step} on server {server} counts a worker twice: {group}")
    return found
