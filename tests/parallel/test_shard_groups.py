"""Sharding inside groups of replicas (HSDP): the groups, and the numbers of one process whatever else is on."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from harness import run, run_raw
from matrix import Case, Trained, Transformer, batch_of, difference, loss_of, share, train
from zoo import QUIET

import echelon
from echelon import Shard, Strategy
from echelon.base.errors import UsageError
from echelon.plan.shard_groups import resolve_groups

OPTIONS_WITH_GROUPS = ("plain", "merge", "clip", "recompute")


def test_groups_equal_one_process_with_every_option() -> None:
    """Each level in two groups of two ranks has the losses and weights of one process."""
    cases = [Case("transformer", f"shard{level} in groups", o) for level in (1, 2, 3) for o in OPTIONS_WITH_GROUPS]
    one = run(train, cases, ranks=1)[0]
    for result in run(train, cases, ranks=4):
        for case in cases:
            assert difference(result[case.name], one[case.name]) < 1e-5, case.name


def train_within(within: Literal["host"] | None) -> tuple[Trained, int]:
    """Return what was trained, and the entries that this rank's optimizer holds."""
    echelon.init()
    torch.manual_seed(3)
    model = Transformer()
    strategy = Strategy(fast=False, shard=Shard(level=3, within=within))
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = echelon.distribute(model, loss=loss_of("transformer"), optimizer=made, strategy=strategy, log=QUIET)
    losses = []
    for step in range(3):
        mine = share(batch_of("transformer", step), engine.world.data_rank, engine.plan.replicas)
        losses.append(float(engine.step(*mine)))
    found = Trained(losses, engine.whole_state())
    held = sum(p.numel() for group in made.param_groups for p in group["params"])
    engine.close()
    return found, held


def test_host_is_the_group_of_its_ranks() -> None:
    """Two hosts of two ranks: each rank holds a half of the state."""
    (one, whole), *_ = run(train_within, None, ranks=1)
    for ended in run_raw(train_within, "host", ranks=4, hosts=2):
        found, held = ended
        assert difference(found, one) < 1e-5
        assert 0.4 * whole < held < 0.6 * whole


def test_groups_are_resolved_or_refused_in_a_line() -> None:
    four, host = Shard(level=3, within=2), Shard(level=3, within="host")
    assert resolve_groups(four, {"replicate": 4}, (), 4) == four
    assert resolve_groups(four, {"replicate": 2}, (), 2) == Shard(level=3)
    assert resolve_groups(four, {"replicate": 1}, (), 1) is None
    assert resolve_groups(host, {"replicate": 4, "split": 2}, (), 4) == four
    assert resolve_groups(host, {"replicate": 4}, (), 4) == Shard(level=3)
    for mesh, order, each, words in (
        ({"replicate": 3}, (), 3, "cannot form groups of 2"),
        ({"replicate": 4, "split": 2}, (), 2, "has one replica"),
        ({"replicate": 4, "split": 4}, (), 2, "no whole replica"),
        ({"replicate": 4}, (0, 2, 1, 3), 2, "do not lie evenly"),
    ):
        with pytest.raises(UsageError, match=words):
            resolve_groups(four if "cannot" in words else host, mesh, order, each)
    with pytest.raises(UsageError, match="2 or more replicas"):
        Shard(within=1)


def test_explain_counts_the_bytes_of_groups() -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    text = Strategy(shard=Shard(level=2, within="host")).explain(model, ranks=8, ranks_per_host=4)
    assert "over 4 ranks, to each its rows" in text
    assert "the rows are then summed across 2 groups" in text
    assert "rows of gradients, summed across groups" in text
