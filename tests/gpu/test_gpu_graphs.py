"""CUDA graphs: a step that is replayed gives what the step gives as it is written. Nothing else may use the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from harness import run
from plain import ON_GPU, Trained, assert_equal, batch_of, train_with_engine
from torch import Tensor
from zoo import token_loss

from echelon import Fast, Strategy

STEPS = 64  #: a graph is kept after some 44

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def mean_over_tokens(scores: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose weight is known from its shape."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").mean()


def trained(options: list[dict[str, Any]], loss: Callable[..., Tensor] = token_loss) -> list[Trained]:
    """Train with each of these, one after another."""
    os.environ.pop("ECHELON_FAST", None)
    batches = [batch_of("words", step) for step in range(STEPS)]
    return [train_with_engine("words", batches, loss=loss, strategy=Strategy(**each)) for each in options]


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


@pytest.mark.parametrize("loss", [token_loss, mean_over_tokens])
def test_replayed_steps_are_merged_like_those_as_written(loss: Callable[..., Tensor]) -> None:
    """The weight of a loss that may ignore targets is known too late for a graph, which a line says."""
    merged = {"amp": False, "gradient_merge": 2}
    each = [merged | {"fast": Fast(compile=False, graphs=graphs)} for graphs in (False, None)]
    off, on = run(trained, each, loss, ranks=1)[0]
    by_shape = "forward and backward are one CUDA graph now" if loss is mean_over_tokens else "ignored targets"
    assert by_shape in on.notes["said"], on.notes["said"]
    assert_equal(on, off, 1e-4, "merged")
