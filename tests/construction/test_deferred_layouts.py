"""A model built in ``deferred()`` begins with the weights of a plain one on every layout, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run
from matrix import LAYOUTS, MODELS, Layout, batch_of, loss_of, share
from torch import Tensor, nn
from zoo import QUIET

import echelon

CASES = {
    2: [
        ("convnet", "dp2"), ("transformer", "split2"), ("transformer", "1f1b2"), ("unet", "shard1"),
        ("convnet", "shard2"), ("experts", "split2"), ("transformer", "interleaved2"),
    ],
    3: [("transformer", "shard3"), ("experts", "shard3")],
    4: [("transformer", "pp2 x split2"), ("unet", "shard3 x pp2"), ("transformer", "shard3 x split2")],
}  # fmt: skip


def rank_main(cases: list[tuple[str, str]]) -> dict[str, list[str]]:
    echelon.init()
    return {f"{model} | {layout}": differences(model, LAYOUTS[layout]) for model, layout in cases}


def differences(model: str, layout: Layout) -> list[str]:
    """Return what differs between the deferred and the plain model: initial weights, losses, trained weights."""
    torch.manual_seed(3 if echelon.rank() == 0 else 4)  # every rank gets the weights of rank 0
    state = torch.get_rng_state()
    plain = MODELS[model]()
    initial, expected = trained(plain, model, layout)
    torch.set_rng_state(state)
    with echelon.deferred():
        built = MODELS[model]()
    if not all(parameter.is_meta for parameter in built.parameters()):
        return ["not on meta"]
    found_initial, found = trained(built, model, layout)
    both = {**{f"initial {k}": (v, found_initial[k]) for k, v in initial.items()}}
    both |= {k: (v, found[k]) for k, v in expected.items()}
    return [name for name, (a, b) in both.items() if not torch.equal(a, b) or a.dtype != b.dtype]


def trained(model: nn.Module, name: str, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    echelon.annotate(model, layout.marks(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    within = layout.ranks // max(1, layout.copies // (layout.splits if layout.spread else 1))
    engine = echelon.distribute(
        model, optimizer, loss=loss_of(name), log=QUIET, sample=batch_of(name, 0),
        strategy=echelon.Strategy(fast=False, **({"shard": layout.shard} if layout.shard else {})),
        cluster=echelon.cluster(average=within) if layout.splits > 1 else None,
    )  # fmt: skip
    initial = engine.whole_state()
    shares = [share(batch_of(name, step), engine.world.data_rank, engine.plan.replicas) for step in range(2)]
    losses = {f"loss {step}": engine.step(*batch).detach() for step, batch in enumerate(shares)}
    weights: dict[str, Any] = {**losses, **engine.whole_state()}
    engine.close()
    return initial, weights


@pytest.mark.parametrize("ranks", CASES)
def test_deferred_model_equals_plain_one(ranks: int) -> None:
    for found in run(rank_main, CASES[ranks], ranks=ranks):
        assert found == {f"{model} | {layout}": [] for model, layout in CASES[ranks]}
