"""The table that consoles show when a rank is late: the state of each rank, and the ranks it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.base.formatting import text_table
from echelon.distributed.activity import format_ranks
from echelon.observability.stall.diagnose import Seens, StallDiagnosis, find_missing_ranks
from echelon.observability.stall.rank_status import RankObservation

_HEAD = ("rank", "host", "step", "phase", "waits in", "for", "since")
#: Most rows; larger jobs show the late ranks and the first waiting ranks.
MOST_ROWS = 32


def table(seen: Seens, finding: StallDiagnosis, stacks: Mapping[int, str], ending: str) -> str:
    """Return the text of a stall report; ``ending`` is its last line, on what happens next."""
    shown = _chosen(seen, finding)
    lines = text_table([_HEAD, *(_row(seen[rank], seen) for rank in shown)])
    if len(shown) < len(seen):
        lines.append(f"({len(seen) - len(shown)} more ranks)")
    lines += finding.cause.splitlines()
    for rank in finding.late:
        if rank in stacks:
            lines += [f"rank {rank} is here:", *(f"  {line}" for line in stacks[rank].splitlines())]
    return "\n".join(["echelon: the job has stalled", *lines, ending])


def _chosen(seen: Seens, finding: StallDiagnosis) -> list[int]:
    first = [*finding.late, *(rank for rank in sorted(seen) if rank not in finding.late)]
    return sorted(first[:MOST_ROWS])


def _row(rank: RankObservation, seen: Seens) -> Sequence[str]:
    status, wait = rank.status, rank.wait
    if status is None:
        return (str(rank.rank), "?", "?", "no heartbeat", "", "", "")
    phase = "left" if status.left else status.phase
    since = wait.seconds if wait else status.seconds + rank.silent
    what = "" if wait is None else f"{wait.call}{': ' if wait.what else ''}{wait.what}"
    whom = find_missing_ranks(rank.rank, seen)
    return (str(rank.rank), status.host, str(status.step), phase, what, _ranks(whom), f"{since:.0f} s")


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
