"""Lives of jobs with parameter servers, by seed: real servers and workers on simulated disks, clocks and networks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutants import MUTANTS
from mutation import find
from seeds import FOUND_BY, KEPT
from server_life import LifeResult, live, simulated_servers

LIVES, BLOCK = 60, 15


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> Iterator[None]:
    with simulated_servers():
        yield


def check(result: LifeResult) -> None:
    trace = "\n".join(result.trace[-60:])
    assert not result.violations, (
        f"seed {result.seed} breaks a law; `make simulate RUN='server_life.py {result.seed}'` shows its trace, "
        f"seeds.py is for keeping it: {result.violations}\n{trace}"
    )


@pytest.mark.parametrize("first", range(0, LIVES, BLOCK))
def test_lives_obey_the_laws(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check(live(seed))


def test_seeds_that_once_failed_obey_the_laws() -> None:
    for seed in KEPT:
        check(live(seed))


def test_seed_replays_a_life_to_the_last_step() -> None:
    one, other = live(3), live(3)
    assert (one.trace, one.operations, one.switches) == (other.trace, other.operations, other.switches)


@pytest.mark.parametrize("name", FOUND_BY)
def test_life_finds_a_bug_of_one_line(name: str) -> None:
    """Find a mutant by its kept seed; after a change of the simulation another one may be needed."""
    assert find(MUTANTS[name], iter([FOUND_BY[name], *range(20)]), live) is not None
