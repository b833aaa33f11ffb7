"""Lives of launchers, by seed: real agents and rendezvous with simulated ranks, stores, networks and clocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launcher_life import live
from launcher_mutants import MUTANTS
from mutation import find
from seeds import LAUNCHER_FOUND_BY, LAUNCHER_KEPT
from simulated_launchers import simulated_launchers

LIVES = 60


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> Iterator[None]:
    with simulated_launchers():
        yield


def check(seed: int) -> None:
    result = live(seed)
    trace = "\n".join(result.trace[-60:])
    assert not result.violations, (
        f"seed {seed} breaks a law; `make simulate RUN='launcher_life.py {seed}'` shows its trace: "
        f"{result.violations}\n{trace}"
    )


def test_lives_of_launchers_obey_the_laws() -> None:
    for seed in range(LIVES):
        check(seed)


def test_seeds_of_launchers_that_once_failed_obey_the_laws() -> None:
    for seed in LAUNCHER_KEPT:
        check(seed)


def test_seed_replays_a_life_of_launchers() -> None:
    one, other = live(11), live(11)
    assert (one.trace, one.switches) == (other.trace, other.switches)


@pytest.mark.parametrize("name", LAUNCHER_FOUND_BY)
def test_life_finds_a_bug_of_launchers(name: str) -> None:
    """Find a mutant by its kept seed; after a change of the simulation another one may be needed."""
    assert find(MUTANTS[name], iter([LAUNCHER_FOUND_BY[name], *range(20)]), live) is not None
