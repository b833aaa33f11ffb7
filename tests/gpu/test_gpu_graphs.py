"""CUDA graphs: a step that is replayed gives what the step gives as it is written. Nothing else may use the device."""

from __future__ import annotations

import os
from typing import Any

import pytest
from harness import run
from plain import ON_GPU, Trained, assert_equal, batch_of, train_with_engine

from echelon import Fast, Strategy

STEPS = 64  #: a graph is kept after some 44

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def trained(options: list[dict[str, Any]]) -> list[Trained]:
    """Train with each of these, one after another."""
    os.environ.pop("ECHELON_FAST", None)
    batches = [batch_of("words", step) for step in range(STEPS)]
    return [train_with_engine("words", batches, strategy=Strategy(**each)) for each in options]


@pytest.mark.parametrize("compile", [None, False])
def test_replayed_steps_equal_those_as_written(compile: bool | None) -> None:
    """In fp32, over all steps: the kernels are the same."""
    off, on = run(
        trained,
        [{"amp": False, "fast": Fast(compile=compile, graphs=graphs)} for graphs in (False, None)],
        ranks=1,
    )[0]
    assert "CUDA graph" not in off.notes["said"]
    assert "forward and backward are one CUDA graph now" in on.notes["said"], on.notes["said"]
    assert_equal(on, off, 1e-4, f"compile={compile}")


def test_replayed_steps_are_merged_like_those_as_written() -> None:
    off, on = run(
        trained,
        [{"amp": False, "gradient_merge": 2, "fast": Fast(compile=False, graphs=graphs)} for graphs in (False, None)],
        ranks=1,
    )[0]
    assert "forward and backward are one CUDA graph now" in on.notes["said"], on.notes["said"]
    assert_equal(on, off, 1e-4, "merged")
