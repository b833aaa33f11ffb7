"""``StallPlugin``: the launcher's part of stall detection. The first host decides, every host prints each report once.

Each launcher also checks the process states of its own ranks, because a stopped process cannot report itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from echelon.base.environment import STALL, STALL_JUDGE
from echelon.base.errors import EchelonError
from echelon.base.poll_interval import PollInterval
from echelon.launcher.agent_plugin import Round
from echelon.launcher.failure import STALLED, Failure
from echelon.observability.stall.detector import StallDetector, StallReport, log_stall_reports, period
from echelon.observability.stall.reporter import PREFIX

#: Process states that other hosts need to know, see proc(5).
_TELLING = "TtZD"


class StallPlugin:
    """A plugin of the launcher.

    limit:  seconds that a rank may be late; 0: no limit
    ends:   True if the round ends when a rank is late and does not work
    """

    def __init__(self, limit: float, *, ends: bool) -> None:
        self._limit, self._ends = limit, ends
        self._at: Round | None = None
        self._pids: Mapping[int, int] = {}
        self._detector: StallDetector | None = None
        self._states: dict[int, str] = {}
        self._shown = 0
        self._interval = PollInterval(period(limit))

    @property
    def announcement(self) -> Mapping[str, str]:
        return {}

    def environment(self, at: Round) -> Mapping[str, str]:
        return {STALL: f"{self._limit:g}", STALL_JUDGE: "launcher"}

    def begin(self, at: Round, pids: Mapping[int, int]) -> None:
        self._at, self._pids, self._states, self._shown, self._detector = at, dict(pids), {}, 0, None
        if at.node_rank == 0 and at.world_size > 1 and self._limit > 0:
            host, port = at.rank_store
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
            self._detector = StallDetector(PrefixStore(PREFIX, store), at.world_size, self._limit, ends=self._ends)

    def poll(self) -> Failure | None:
        if self._at is None or self._limit <= 0 or not self._interval.due():
            return None
        try:
            self._publish_states(self._at)
            failure = self._check(self._at, self._detector, time.monotonic()) if self._detector is not None else None
            self._show(self._at)
        except RuntimeError:  # the agent notices a store that does not answer any more
            return None
        return failure

    def end(self) -> None:
        if self._at is not None and self._limit > 0:
            # The first host may have written a report just before it ended the round.
            with contextlib.suppress(RuntimeError, EchelonError):
                self._show(self._at)
        self._at, self._detector = None, None

    def close(self) -> None:
        self.end()

    def _publish_states(self, at: Round) -> None:
        found = {rank: process_state(pid) for rank, pid in self._pids.items()}
        states = {rank: state for rank, state in found.items() if state and state in _TELLING}
        if states != self._states:
            self._states = states
            at.store.set(_states_of(at.node_rank), json.dumps(states))

    def _check(self, at: Round, detector: StallDetector, now: float) -> Failure | None:
        report, lines = detector.examine(now, self._all_states(at))
        log_stall_reports(report, lines)
        for text in ([report.table] if report else []) + [f"echelon: {line}" for line in lines]:
            at.store.set(f"stall/table/{int(at.store.add('stall/tables', 1)) - 1}", text)
        if report is None or report.culprit is None or report.finding.works or not self._ends:
            return None
        return _failure(at, report)

    def _all_states(self, at: Round) -> dict[int, str]:
        result = dict(self._states)
        for node in range(1, len(at.hosts)):
            if at.store.check([_states_of(node)]):
                result |= _read_states(at.store.get(_states_of(node)))
        return result

    def _show(self, at: Round) -> None:
        while at.store.check([key := f"stall/table/{self._shown}"]):
            print(bytes(at.store.get(key)).decode(errors="replace"), file=sys.stderr, flush=True)
            self._shown += 1


def process_state(pid: int) -> str:
    """Return one letter, see proc(5); '' if the process has ended or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _states_of(node: int) -> str:
    return f"stall/processes/{node}"


def _read_states(text: bytes) -> dict[int, str]:
    try:
        return {int(rank): str(state)[:1] for rank, state in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {}


def _failure(at: Round, report: StallReport) -> Failure:
    assert report.culprit is not None
    rank, status = report.culprit.rank, report.culprit.status
    return Failure(
        rank=rank,
        world_size=at.world_size,
        host=status.host if status else _host_of(at, rank),
        pid=status.pid if status else 0,
        exit_code=1,
        time=time.time(),
        log=str(at.log_dir / f"rank-{rank}.log"),
        kind=STALLED,
        message=report.finding.brief,
    )


def _host_of(at: Round, rank: int) -> str:
    for host in at.hosts:
        if rank < len(host.endpoints):
            return host.name
        rank -= len(host.endpoints)
    return "?"
