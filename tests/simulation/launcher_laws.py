"""The laws that the history of a job's rounds must obey. They know only what the faults were and what launchers said.

- All hosts of a round adopt one outcome.
- A round ends for a cause that was there: a rank that a fault has hit, a host that a fault has hit, a signal,
  a newcomer.
- No more rounds are counted than faults were brought, and no more than the budget of restarts.
- A launcher ends before the work is done only for a reason, with the exit code of the failure that it names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulated_launchers import AdoptedOutcome, LauncherEnding
from simulated_store import host_of

if TYPE_CHECKING:
    from launcher_life import LauncherLife

#: Seconds after a fault of a host in which its consequences may still be noticed.
AFTERMATH = 60.0
RANK_FAULTS = {"kill a rank", "fail a rank", "exit code", "freeze a rank", "explained failure"}
SIGNALS = {"signal a rank", "signal a launcher"}
HOST_FAULTS = {"kill a launcher", "kill all", "lose a host", "cut a link", "freeze a host", "slow host"}


def find_broken_laws(life: LauncherLife) -> list[str]:
    """Return the laws that the life has broken."""
    return [*_check_agreement(life), *_check_causes(life), *_check_budget(life), *_check_endings(life)]


def _rounds(life: LauncherLife) -> dict[tuple[tuple[str, ...], int], list[AdoptedOutcome]]:
    result: dict[tuple[tuple[str, ...], int], list[AdoptedOutcome]] = defaultdict(list)
    for adopted in life.job.outcomes:
        result[adopted.tokens, adopted.number].append(adopted)
    return result


def _is_local(adopted: AdoptedOutcome) -> bool:
    """Return True for the outcome of a host that has lost the store, and so decides alone."""
    return "no longer answers" in adopted.outcome.failure.line or (
        adopted.outcome.cause == "leaving" and not adopted.outcome.again
    )


def _check_agreement(life: LauncherLife) -> Iterator[str]:
    for (_, number), adopted in _rounds(life).items():
        said = {(a.outcome.again, a.outcome.cause, a.outcome.failure.line) for a in adopted if not _is_local(a)}
        if len(said) > 1:
            yield f"round {number} has ended in different ways: {said}"


def _check_causes(life: LauncherLife) -> Iterator[str]:
    for adopted in life.job.outcomes:
        outcome, failure = adopted.outcome, adopted.outcome.failure
        if outcome.cause == "failed" and failure.ours and outcome.again:
            yield f"round {adopted.number} is tried again after {failure.line}, which one line explains"
        if outcome.cause in ("failed", "stuck"):
            group = adopted.group
            is_victim = group is not None and failure.rank in group.victims
            if not is_victim and not (failure.secondary and life.hurt_near(adopted.at, AFTERMATH)):
                victims = sorted(group.victims) if group is not None else []
                yield f"round {adopted.number} names {failure.line}; faults have hit {victims}"
        elif outcome.cause == "lost" and not _is_lost(life, failure.host, adopted.at):
            yield f"round {adopted.number} has lost host {failure.host}, which no fault has hit"
        elif outcome.cause in ("leaving", "left") and not SIGNALS & set(life.result.faults):
            yield f"round {adopted.number} ends by a host that leaves, and no signal was given"


def _is_lost(life: LauncherLife, host: str, at: float) -> bool:
    """Return True if a fault has hit the host, or if its launcher has left the store since another host was hit."""
    name = host_of(host.rpartition(":")[0]) if ":" in host else host  # a spare knows the store by its endpoint
    ended = any(f"host-{ending.host}" == name and ending.at < at for ending in life.job.endings)
    moved = any(one.host == name and _is_local(one) and one.at < at for one in life.job.outcomes)
    return ended or moved or life.hurt_near(at, AFTERMATH, name)


def _counted(life: LauncherLife) -> int:
    """Return the most restarts that any host has seen; a job that all launchers have left begins anew at round 0."""
    most, counted = 0, Counter[str]()
    for one in life.job.outcomes:
        if one.number <= 0 and one.tokens:
            counted[one.host] = 0
        counted[one.host] += one.outcome.counted and one.outcome.again
        most = max(most, counted[one.host])
    return most


def _check_budget(life: LauncherLife) -> Iterator[str]:
    shape, faults, counted = life.shape, life.result.faults, _counted(life)
    if counted > shape.max_restarts:
        yield f"{counted} restarts, and {shape.max_restarts} are allowed"
    most = sum(faults[name] for name in RANK_FAULTS)
    most += 0 if shape.saves else faults["signal a rank"]  # SIGTERM ends a rank that cannot save
    if not shape.elastic or HOST_FAULTS & set(faults):
        most += sum(faults[name] * (1 if name != "kill all" else shape.hosts) for name in HOST_FAULTS | SIGNALS)
    if counted > most:
        yield f"{counted} restarts for {most} faults: {dict(faults)}"


def _check_endings(life: LauncherLife) -> Iterator[str]:
    faults = set(life.result.faults)
    for ending in life.job.endings:
        kind = type(ending.error).__name__
        if ending.at >= life.done_at and not (kind == "JobFailed" and life.is_hit_late):
            if ending.code and not _was_not_needed(life, ending):
                yield f"the work is done, and launcher {ending.host} ends with {ending.code}: {ending.error}"
        elif not ending.code:
            yield f"launcher {ending.host} ends with 0, and the work is not done"
        elif kind == "JobFailed":
            yield from _check_failure(life, ending)
        elif kind in ("HostPreempted", "SignalException") and not SIGNALS & faults:
            yield f"launcher {ending.host} says that it was stopped, and no signal was given"
        elif not faults & (HOST_FAULTS | SIGNALS) and not _was_not_needed(life, ending):
            yield f"launcher {ending.host} ends without a reason: {ending.error}"


def _was_not_needed(life: LauncherLife, ending: LauncherEnding) -> bool:
    """Return True for a spare, also one that lost its place in a round, and for a launcher that comes too late."""
    failures = [other.error for other in life.job.endings if type(other.error).__name__ == "JobFailed"]
    names_it = any(failure.failure.line in str(ending.error) for failure in failures)  # type: ignore[union-attr]
    if names_it or (not ending.tokens and (bool(failures) or "did not need this one" in str(ending.error))):
        return True
    # a host that was away looks for the job where it lost it, and waits in vain if the job ends meanwhile
    was_away = life.hurt_near(life.done_at, AFTERMATH, f"host-{ending.host}")
    return was_away and f"host-{ending.host}" not in life.job.groups[-1].hosts


def _check_failure(life: LauncherLife, ending: LauncherEnding) -> Iterator[str]:
    failure, faults = ending.error.failure, set(life.result.faults)  # type: ignore[union-attr]
    if ending.code != failure.status:
        yield f"launcher {ending.host} ends with {ending.code} for {failure.line}"
    is_spent = _counted(life) >= life.shape.max_restarts
    is_reason = is_spent or "explained failure" in faults or bool(SIGNALS & faults)
    if not is_reason:
        yield f"launcher {ending.host} gives up after {_counted(life)} of {life.shape.max_restarts} restarts"
