"""Finds the ranks that hold up a job from the reports of all ranks. Pure functions: no clock, no store, no process.

A waiting rank waits for those ranks of its group that have not reached the same call. Following these waits ends at
ranks that do not wait: they are late. If there are none, ranks wait for each other in a cycle, because they have made
different calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.observability.stall.rank_status import RankObservation, RankStatus, RankWait, circle_of

#: Name of a forward pass that user code runs, used like the name of an engine call.
FORWARD = "forward"
#: Seconds after which two ranks in calls that never match are reported, even if the limit is longer.
HOPELESS = 5.0
#: Text for process states (see proc(5)); other states tell nothing.
STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "D": "waits for a disk"}

Seens = Mapping[int, RankObservation]


@dataclass(frozen=True)
class StallDiagnosis:
    """The cause of a stall.

    late:  ranks that cause it, as far as known; empty if all have reached the call and the network is slow
    cause: one or more sentences
    brief: short reason why the first of these ranks is late
    works: True if all of them are working and may still arrive
    """

    late: tuple[int, ...]
    cause: str
    brief: str = ""
    works: bool = False


def find_stall(seen: Seens, limit: float) -> StallDiagnosis | None:
    """Return the cause of a stall if a rank has waited for ``limit`` seconds, else None.

    Calls that never match are found after ``HOPELESS`` seconds at the latest.
    """
    if (mismatch := _mismatch(seen, min(limit, HOPELESS))) is not None:
        return mismatch
    stalled = [rank for rank in sorted(seen) if (wait := seen[rank].wait) and wait.seconds >= limit]
    stalled = [rank for rank in stalled if not _out_of_action(seen[rank])]
    if not stalled:
        return None
    reached = _follow(stalled, seen)
    late = tuple(rank for rank in reached if _out_of_action(seen[rank]) or seen[rank].wait is None)
    if late:
        works = all(seen[rank].works and not _out_of_action(seen[rank]) for rank in late)
        return StallDiagnosis(late, "\n".join(_late(seen[rank]) for rank in late), _why(seen[late[0]]), works)
    if any(find_missing_ranks(rank, seen) for rank in reached):
        return _ring(stalled[0], seen)
    return StallDiagnosis((), "no rank is missing: all ranks have reached the calls they wait in; is the network up?")


def find_missing_ranks(rank: int, seen: Seens) -> list[int]:
    """Return the ranks that have not reached the call in which ``rank`` waits."""
    wait = seen[rank].wait
    if wait is None:
        return []
    members = circle_of(wait, len(seen))
    return [other for other in members if other != rank and other in seen and not _has_come(seen[other], wait)]


def _has_come(other: RankObservation, wait: RankWait) -> bool:
    if other.status is None or other.status.left:
        return False
    count, theirs = other.status.counts.get(wait.key, 0), other.wait
    if _out_of_action(other):  # a stopped process does not take part in the call that it waits in
        return count > wait.number
    if theirs is not None and theirs.key == wait.key:
        return theirs.number >= wait.number
    return count >= wait.number


def _follow(begin: list[int], seen: Seens) -> list[int]:
    """Return ``begin`` and all ranks that they wait for, directly or indirectly, in rank order."""
    found, ahead = set(begin), list(begin)
    while ahead:
        rank = ahead.pop()
        for other in [] if _out_of_action(seen[rank]) else find_missing_ranks(rank, seen):
            if other not in found:
                found.add(other)
                ahead.append(other)
    return sorted(found)


def _out_of_action(rank: RankObservation) -> bool:
    """Return True if the rank's last report is no longer valid: it has exited, is stopped or is lost."""
    return rank.status is None or rank.status.left or rank.lost or rank.process in ("T", "t", "Z")


def _mismatch(seen: Seens, patience: float) -> StallDiagnosis | None:
    """Find two ranks that each wait in a call that the other one never reaches; None if there are none."""
    waits = {
        rank: wait
        for rank, one in sorted(seen.items())
        if (wait := one.wait) and wait.seconds >= patience and not _out_of_action(one)
        if rank in circle_of(wait, len(seen))  # a point-to-point message may just be slow
    }
    missing = {rank: set(find_missing_ranks(rank, seen)) for rank in waits}
    for rank, wait in waits.items():
        for other, theirs in waits.items():
            if rank < other and other in missing[rank] and rank in missing[other] and wait.key != theirs.key:
                return _different_calls(seen[rank], seen[other])
    return None


def _ring(first: int, seen: Seens) -> StallDiagnosis:
    path = [first]
    while (following := find_missing_ranks(path[-1], seen)) and following[0] not in path:
        path.append(following[0])
    other = following[0] if following else path[-1]
    a, b = sorted((path[-1], other))
    return _different_calls(seen[a], seen[b])


def _different_calls(one: RankObservation, other: RankObservation) -> StallDiagnosis:
    first, second = where(one), where(other)
    cause = (
        f"ranks {one.rank} and {other.rank} are in different calls: rank {one.rank} in {first}, rank {other.rank} in "
        f"{second}; {advice(*(seen.status.call for seen in (one, other) if seen.status))}"
    )
    return StallDiagnosis((one.rank, other.rank), cause, f"it is in {first} and rank {other.rank} in {second}")


def advice(*calls: str) -> str:
    """Return the remedy if ranks make different calls."""
    if FORWARD in calls:
        return (
            "batch norm in training mode shares its statistics over all replicas: run this forward on every rank, or "
            "call model.eval() before it"
        )
    return "every rank must make the same calls in the same order"


def where(rank: RankObservation) -> str:
    """Return text for the call that a rank is in, such as ``save()`` or ``step 8 (sum of gradients)``."""
    status = rank.status
    if status is None:
        return "an unknown call"
    inside = f" ({status.wait.call})" if status.wait else ""
    if status.call == "step":
        return f"step {status.step}{inside}"
    return f"{status.call}(){inside}" if status.call else (status.wait.call if status.wait else status.phase)


def _late(rank: RankObservation) -> str:
    return f"{rank.name} is late: {_why(rank)}"


def _why(rank: RankObservation) -> str:
    status = rank.status
    if status is not None and status.left:
        return "its script has ended"
    if status is None or rank.lost or rank.process in ("T", "t", "Z"):
        state = STATES.get(rank.process, "runs, but its Python interpreter does not" if rank.process else "")
        since = "at all" if status is None else f"for {rank.silent:.0f} s"
        return f"it has sent no heartbeat {since}" + (f"; its process {state}" if state else "")
    return f"it has been in {_doing(status)} for {status.seconds + rank.silent:.0f} s"


def _doing(status: RankStatus) -> str:
    step = f" of step {status.step}" if status.call == "step" else ""
    return status.phase if status.phase == "user code" else f"{status.phase}{step}"
