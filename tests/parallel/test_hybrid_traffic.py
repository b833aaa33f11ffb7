"""Traffic of a step, counted: exactly so many collectives and messages for each way to spread a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, replicate, split, stage


class Net(nn.Module):
    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(F.relu(self.up(self.first(x)))))


def count(marks: dict[str, Any], **strategy: Any) -> dict[str, int]:
    """Count messages of step 4: by then shapes are announced, gathers have found their order, and the roll call
    of the first steps is over."""
    echelon.init(device="cpu")  # several ranks on one GPU exchange by other means
    torch.manual_seed(0)
    model = echelon.annotate(Net(), marks)
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=Strategy(**strategy),
        log=QUIET,
    )
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=g), torch.randint(6, (8,), generator=g)
    if engine.plan.replicas > 1:
        x, y = x[echelon.rank() * 4 :][:4], y[echelon.rank() * 4 :][:4]
    engine.step(x, y)
    engine.step(x, y)
    engine.step(x, y)
    with Collectives() as sent:
        engine.step(x, y)
    engine.close()
    return dict(sent.count)


PAIR = {"up": split("column"), "down": split("row")}
PIPELINE = {"": pipeline(micro_batches=4), "first": stage(0), "up": stage(0), "down": stage(1), "head": stage(1)}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    # one bucket, which takes loss and samples along
    "data parallel": ({}, {}, {"all_reduce": 1}),
    # one sum forward, one backward; ranks share a batch, so no gradient travels
    "pair": (PAIR, {}, {"all_reduce": 2}),
    "pair and clip": (PAIR, {"clip": 1.0}, {"all_reduce": 2, "all_gather": 1}),
    # the sum of the head's input gradient, and one message for the loss: logits stay where they are
    "classes": ({"head": split()}, {}, {"all_reduce": 1, "all_gather": 1}),
    # each rank its own batch: shapes, features and targets in, one row of losses, loss gradients; features' gradient
    # back by exchange; a bucket for what is replicated, with loss and samples
    "classes beside replicas": (
        {"first": replicate(), "up": replicate(), "down": replicate(), "head": split()},
        {},
        {"all_gather": 5, "send": 1, "recv": 1, "all_reduce": 1},
    ),
    # four micro-batches, one message each way; the loss and its samples in one small one
    "pipeline": (PIPELINE, {}, {"send": 4, "recv": 4, "all_gather": 1}),
    # a scatter of gradients and a gather of weights for the one bucket (an exchange between two is a send and a recv)
    "shard 1": ({}, {"shard": 1}, {"send": 2, "recv": 2, "all_gather": 1}),
    "shard 2": ({}, {"shard": 2}, {"send": 2, "recv": 2, "all_gather": 1}),
    # weights are gathered for forward and for backward, gradients scattered
    "shard 3": ({}, {"shard": 3}, {"send": 3, "recv": 3, "all_gather": 1}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_exactly_so_much_is_sent(name: str) -> None:
    marks, strategy, expected = EXPECTED[name]
    for rank, sent in enumerate(run(count, marks, ranks=2, **strategy)):
        assert sent == expected, f"rank {rank}"
