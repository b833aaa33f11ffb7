"""Blocks of models of transformers stay compiled under shard 3 and stages, with the numbers of one process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from families import FAMILIES
from harness import run

import echelon
from echelon import Fast, Strategy
from echelon.fastpath import compile as compiled

CASES = {"shard 3": {"shard": 3}, "stages 2": {"stages": 2}}


def differences(name: str) -> list[str]:
    """Return what differs between compiled and uncompiled runs in each layout, or was not compiled as a whole."""
    echelon.init()
    compiled.backend = "aot_eager"
    return [f"{case}: {what}" for case, options in CASES.items() for what in differences_in(name, options)]


def differences_in(name: str, options: dict[str, Any]) -> list[str]:
    with redirect_stderr(io.StringIO()) as said:
        plain = trained(name, Strategy(fast=False, **options))
        quick = trained(name, Strategy(fast=Fast(compile=True), **options))
    bad = [line for line in said.getvalue().splitlines() if "graph break" in line or "compile disabled" in line]
    return bad + [key for key, value in plain.items() if not torch.allclose(quick[key], value, rtol=1e-5, atol=1e-6)]


def trained(name: str, strategy: Strategy) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    torch._dynamo.reset()
    family = FAMILIES[name]
    model = family.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, optimizer, strategy=strategy, sample=family.batches(0))
    first, count = engine.world.data_rank, engine.plan.replicas
    batches = [{key: value.chunk(count)[first] for key, value in family.batches(step).items()} for step in range(5)]
    losses = {f"loss {step}": engine.step(**batch).detach() for step, batch in enumerate(batches)}
    weights = engine.whole_state()
    engine.close()
    return {**losses, **weights}


@pytest.mark.parametrize("name", ["Llama", "BERT", "GPT-2"])
def test_compiled_blocks_equal_uncompiled_ones(name: str) -> None:
    assert run(differences, name, ranks=2, timeout=300) == [[], []]
