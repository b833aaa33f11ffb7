"""A part of the parity matrix: every layout once or more, every option with several of them, all four models."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from matrix import LAYOUTS, MODELS, OPTIONS, Case, Trained, all_cases, difference, run_cases


def _chosen() -> list[Case]:
    """Walk through layouts, and through models and options beside them, so that each meets each other sooner or later.
    Layouts of four and eight ranks come once; ``python tests/support/matrix.py`` runs every case."""
    sensible = set(all_cases())
    models, options = list(MODELS), list(OPTIONS)
    chosen: list[Case] = []
    for i, layout in enumerate(LAYOUTS):
        most = 1 if LAYOUTS[layout].ranks > 3 else 2
        turns = [Case(models[(i + k) % 4], layout, options[(i + 2 * k) % 5]) for k in range(20)]
        chosen += [case for case in dict.fromkeys(turns) if case in sensible][:most]
    return chosen


CASES = _chosen()

pytestmark = pytest.mark.timeout(600)  # all cases share a few jobs, which the first test waits for


@pytest.fixture(scope="module")
def found() -> Mapping[str, tuple[list[Trained], Trained]]:
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(case: Case, found: Mapping[str, tuple[list[Trained], Trained]]) -> None:
    many, one = found[case.name]
    for rank, trained in enumerate(many):
        assert difference(trained, one) <= case.tolerance, f"rank {rank}"
