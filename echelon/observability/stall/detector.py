"""``StallDetector``: finds late ranks from the reports of all ranks and reports each stall once, with their stacks.

It runs in the launcher of the first host; under other launchers it runs in rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from echelon.base.heartbeat_monitor import HeartbeatMonitor
from echelon.observability.runlog.events import note_beside
from echelon.observability.stall.diagnose import StallDiagnosis, find_stall
from echelon.observability.stall.rank_status import RankObservation, RankStatus
from echelon.observability.stall.stall_table import table
from echelon.observability.stall.stragglers import Stragglers

#: Seconds between two reports of a rank, and between two checks.
PERIOD = 1.0
#: Seconds without a report after which a rank is lost.
SILENT = 5.0
#: Seconds for which a diagnosis must hold before it is reported, and further seconds to wait for stacks.
CONFIRMED, FOR_STACKS = 2.0, 2.0
#: A rank is working if it uses more than this fraction of a core, or reads and writes more than these bytes per second.
CPU, BYTES = 0.05, 16384.0
_LONGEST_STACK = 20_000


@dataclass(frozen=True)
class StallReport:
    """The report of one stall.

    finding: diagnosis
    table:   text for all consoles
    culprit: first late rank; None if no rank is late
    """

    finding: StallDiagnosis
    table: str
    culprit: RankObservation | None


class _RankWork:
    """The last report of a rank, and whether the rank is working."""

    def __init__(self) -> None:
        self.status: RankStatus | None = None
        self._mark: tuple[float, float, int] | None = None  # time, cpu, io
        self.works = False

    def measure(self, status: RankStatus, now: float) -> None:
        self.status = status
        if self._mark is None:
            self._mark = now, status.cpu, status.io
            return
        then, cpu, io = self._mark
        if now - then >= CONFIRMED:
            seconds = now - then
            self.works = (status.cpu - cpu) / seconds > CPU or (status.io - io) / seconds > BYTES
            self._mark = now, status.cpu, status.io


def period(limit: float) -> float:
    """Return the seconds between two checks; a short limit needs more frequent checks."""
    return min(PERIOD, limit / 4)


class StallDetector:
    """Finds stalls from the reports of all ranks.

    store: store with the reports of the ranks, under ``status/N``
    ranks: number of ranks
    limit: seconds that a rank may be late
    ends:  True if the caller ends the job after a stall
    """

    def __init__(self, store: Store, ranks: int, limit: float, *, ends: bool) -> None:
        self._store = store
        self._ranks = ranks
        self._limit = limit
        self._ends = ends
        self._silence, self._confirmed = min(SILENT, limit), min(CONFIRMED, limit / 2)
        self._work = {rank: _RankWork() for rank in range(ranks)}
        self._stragglers = Stragglers()
        self._checked_at = 0.0
        self._heartbeats = HeartbeatMonitor(lambda: self._checked_at)
        self._finding: StallDiagnosis | None = None  # found, but not reported yet
        self._found_at = 0.0
        self._reported: tuple[int, ...] | None = None
        for rank in range(ranks):  # so that one call reads all keys without waiting for missing ones
            store.compare_set(f"status/{rank}", "", " ")

    def examine(self, now: float, processes: Mapping[int, str]) -> tuple[StallReport | None, list[str]]:
        """Check all ranks; return a report once per stall, and log lines on stragglers.

        now:       monotonic time, seconds
        processes: process states by rank, as in proc(5)
        """
        self._read(now)
        seen = {rank: self._observe(rank, processes) for rank in range(self._ranks)}
        known = {rank: one.status for rank, one in seen.items() if one.status is not None}
        lines = self._stragglers.compare(known, now) if len(known) == self._ranks else []
        return self._rule(seen, now), lines

    def _read(self, now: float) -> None:
        before, self._checked_at = self._checked_at, now
        if now - before > self._silence:  # this process itself was suspended, so no rank is to blame
            self._heartbeats.restart()
            self._finding = None
        for rank, text in enumerate(self._store.multi_get([f"status/{rank}" for rank in range(self._ranks)])):
            try:
                status = RankStatus.from_json(bytes(text))
            except ValueError:
                continue
            if status.rank == rank and self._heartbeats.hear(rank, status.beat):
                self._work[rank].measure(status, now)

    def _observe(self, rank: int, processes: Mapping[int, str]) -> RankObservation:
        work = self._work[rank]
        silent = self._heartbeats.silence(rank) if work.status is not None else 0.0
        return RankObservation(rank, work.status, silent, silent > self._silence, processes.get(rank, ""), work.works)

    def _rule(self, seen: Mapping[int, RankObservation], now: float) -> StallReport | None:
        finding = find_stall(seen, self._limit)
        if finding is None:
            self._finding = self._reported = None
            return None
        if finding.late == self._reported:
            return None
        if self._finding is None or self._finding.late != finding.late:
            self._finding, self._found_at = finding, now
            self._ask_for_stacks(finding)
            return None
        stacks = self._stacks(finding)
        dumb = [rank for rank in finding.late if seen[rank].lost or seen[rank].process in ("T", "t")]
        patience = 0.0 if len(stacks) + len(dumb) >= len(finding.late) else FOR_STACKS
        if now - self._found_at < self._confirmed + patience:
            return None
        self._reported = finding.late
        culprit = seen[finding.late[0]] if finding.late else None
        return StallReport(finding, table(seen, finding, stacks, self._ending(finding)), culprit)

    def _ending(self, finding: StallDiagnosis) -> str:
        if finding.works:
            return (
                "That rank is computing, so no rank is ended; the timeout of the ranks applies "
                "(echelon.init(timeout=...))."
            )
        if self._ends and finding.late:
            return "All ranks are ended now; they are started again if a restart is left."
        return "No rank is ended; the timeout of the ranks applies (echelon.init(timeout=...))."

    def _ask_for_stacks(self, finding: StallDiagnosis) -> None:
        for rank in finding.late:
            self._store.delete_key(f"stack/{rank}")
            self._store.set(f"ask/{rank}", "1")

    def _stacks(self, finding: StallDiagnosis) -> dict[int, str]:
        there = [rank for rank in finding.late if self._store.check([f"stack/{rank}"])]
        return {rank: _cleaned(self._store.get(f"stack/{rank}")) for rank in there}


def log_stall_reports(ruling: StallReport | None, lines: Sequence[str]) -> None:
    """Write the stall report and the lines to the run's events; only the process with the detector calls it."""
    if ruling is not None:
        late = ruling.finding.late
        note_beside("stall", ruling.table, late[0] if len(late) == 1 else None)
    for line in lines:
        note_beside("warning", line)


def _cleaned(stack: bytes) -> str:
    text = bytes(stack[:_LONGEST_STACK]).decode(errors="replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
