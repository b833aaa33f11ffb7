"""Who is late? From what the ranks say of themselves to a finding. Pure: no clock, no store, no process.

A rank that waits does so for those of its circle that have not come to the same point. Following these from one to the
next ends at ranks that wait for nobody: they are late. Where it ends at none, ranks wait for one another in a ring, as
they do when they have made different calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.observability.stall.rank_status import RankObservation, RankStatus, RankWait, circle_of

#: A forward that the user's script runs, as a call among the engine's own.
FORWARD = "forward"
#: Two ranks in calls that can never meet are told after so many seconds, whatever the limit.
HOPELESS = 5.0
#: States of a process, see proc(5), in words. Others say nothing.
STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "D": "waits for a disk"}

Seens = Mapping[int, RankObservation]


@dataclass(frozen=True)
class StallDiagnosis:
    """late:  whose fault it is, as far as can be told; nobody's where all have come and the network is slow
    cause: a sentence, or several
    brief: why the first of them is late, in few words
    works: all of them are at work and may still come
    """

    late: tuple[int, ...]
    cause: str
    brief: str = ""
    works: bool = False


def find_stall(seen: Seens, limit: float) -> StallDiagnosis | None:
    """What holds the job up, when some rank has waited for ``limit`` seconds; calls that can never meet sooner."""
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
    return StallDiagnosis((), "no rank is missing: all have come to the calls that are waited in; is the network up?")


def find_missing_ranks(rank: int, seen: Seens) -> list[int]:
    """The ranks that have not come to where ``rank`` waits."""
    wait = seen[rank].wait
    if wait is None:
        return []
    members = circle_of(wait, len(seen))
    return [other for other in members if other != rank and other in seen and not _has_come(seen[other], wait)]


def _has_come(other: RankObservation, wait: RankWait) -> bool:
    if other.status is None or other.status.left:
        return False
    count, theirs = other.status.counts.get(wait.key, 0), other.wait
    if _out_of_action(other):  # a process that is stopped does not take part in what it waits in
        return count > wait.number
    if theirs is not None and theirs.key == wait.key:
        return theirs.number >= wait.number
    return count >= wait.number


def _follow(begin: list[int], seen: Seens) -> list[int]:
    """All that are waited for, from there on, in the order of ranks."""
    found, ahead = set(begin), list(begin)
    while ahead:
        rank = ahead.pop()
        for other in [] if _out_of_action(seen[rank]) else find_missing_ranks(rank, seen):
            if other not in found:
                found.add(other)
                ahead.append(other)
    return sorted(found)


def _out_of_action(rank: RankObservation) -> bool:
    """Whatever it said last is no longer so."""
    return rank.status is None or rank.status.left or rank.lost or rank.process in ("T", "t", "Z")


def _mismatch(seen: Seens, patience: float) -> StallDiagnosis | None:
    """Two ranks that each wait in a call the other one has not come to, and will not."""
    waits = {
        rank: wait
        for rank, one in sorted(seen.items())
        if (wait := one.wait) and wait.seconds >= patience and not _out_of_action(one)
        if rank in circle_of(wait, len(seen))  # a message between two may just take long
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
    """Return what to do where ranks make different calls."""
    if FORWARD in calls:
        return (
            "batch norm in training mode shares its statistics over all replicas: run this forward on every rank, or "
            "call model.eval() before it"
        )
    return "every rank must make the same calls in the same order"


def where(rank: RankObservation) -> str:
    """``save()``, ``step 8 (sum of gradients)``."""
    status = rank.status
    if status is None:
        return "no call that is known"
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
        state = STATES.get(rank.process, "runs, but its Python does not" if rank.process else "")
        since = "at all" if status is None else f"for {rank.silent:.0f} s"
        return f"it has not been heard of {since}" + (f"; its process {state}" if state else "")
    return f"it is in {_doing(status)} since {status.seconds + rank.silent:.0f} s"


def _doing(status: RankStatus) -> str:
    step = f" of step {status.step}" if status.call == "step" else ""
    return status.phase if status.phase == "user code" else f"{status.phase}{step}"
