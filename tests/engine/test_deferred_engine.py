"""An engine that waits for its first batch: one public face, early calls kept or refused, created once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.engine import engine as engines
from echelon.engine.deferred_engine import DeferredEngine
from echelon.engine.engine import Engine

PUBLIC = [name for name in dir(Engine) if not name.startswith("_")]


def made(sample: Any = None, checkpoint: str | None = None) -> tuple[nn.Module, Any]:
    """Return a pipeline of two stages and its engine."""
    echelon.init(seed=1)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    echelon.annotate(net, {"0": echelon.stage(0), "3": echelon.stage(1), "": echelon.pipeline(micro_batches=2)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    given = {} if checkpoint is None else {"checkpoint": echelon.Checkpoint(dir=checkpoint)}
    return net, echelon.distribute(net, optimizer, F.cross_entropy, sample=sample, log=QUIET, **given)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draw), torch.randint(3, (8,), generator=draw)


def test_deferred_engine_has_the_signatures_of_an_engine() -> None:
    for name in PUBLIC:
        own, whole = (inspect.getattr_static(kind, name) for kind in (DeferredEngine, Engine))
        assert type(own) is type(whole), name
        if callable(whole):
            assert inspect.signature(own) == inspect.signature(whole), name


EARLY: dict[str, Callable[[Any], object]] = {
    "save": lambda engine: engine.save("nowhere"),
    "whole_state": lambda engine: engine.whole_state(),
    "reduce": lambda engine: engine.reduce(),
    "update": lambda engine: engine.update(),
    "grad_norm": lambda engine: engine.grad_norm(),
    "clip_grad_norm_": lambda engine: engine.clip_grad_norm_(1.0),
    "clip_grad_value_": lambda engine: engine.clip_grad_value_(1.0),
    "loss_scale": lambda engine: engine.loss_scale,
    "skipped": lambda engine: engine.skipped,
    "ema": lambda engine: engine.ema.updates,
    "backward": lambda engine: engine.backward(torch.zeros(())),
}
LINES = dict.fromkeys(EARLY, "the pipeline is cut by its first batch, and there was none; call step() first") | {
    "ema": "engine.ema: there is no average; call engine.ema(decay=0.999) before training",
    "backward": "a pipeline runs its own backward, micro-batch by micro-batch; call engine.step()",
}


def early() -> tuple[list[str], dict[str, Any]]:
    _, engine = made()
    said = []
    for call in EARLY.values():
        with pytest.raises(UsageError) as refused:
            call(engine)
        said.append(str(refused.value))
    engine.synchronize()
    engine.log({"a": 1.0})
    shown = {"steps": engine.steps, "output": engine.output, "data": engine.world.data_size, "mesh": engine.plan.mesh}
    return said, {**shown, "is": isinstance(engine, echelon.Engine), "optimizers": list(engine.optimizers)}


def test_early_calls_are_refused_in_one_line() -> None:
    for said, shown in run(early, ranks=2):
        assert shown == {
            "steps": 0, "output": None, "data": 1, "mesh": {"replicate": 1, "stage": 2}, "is": True,
            "optimizers": ["main"],
        }  # fmt: skip
        for line, expected in zip(said, LINES.values(), strict=True):
            assert line.startswith(expected)


def trained(directory: str, sample: Any) -> tuple[list[float], dict[str, float], dict[str, Tensor], int]:
    """Evaluate, train four steps and save; count the engines that were created."""
    created: list[int] = []
    inner = engines.parallelize
    engines.parallelize = lambda planned, first: (created.append(1), inner(planned, first))[1]  # type: ignore
    try:
        _, engine = made(sample)
        engine.ema(decay=0.9)
        judged = engine.evaluate([batch(7), batch(8)])
        losses = [float(engine.step(*batch(step))) for step in range(4)]
        averaged = engine.ema.whole_state()
        engine.save(directory)
        engine.close()
    finally:
        engines.parallelize = inner
    return losses, judged, averaged, len(created)


def deferred_and_whole(directory: str) -> list[tuple[list[float], dict[str, float], dict[str, Tensor], int]]:
    return [trained(f"{directory}/deferred", None), trained(f"{directory}/whole", batch(0))]


def test_first_batch_and_sample_give_the_same_engine(tmp_path: Path) -> None:
    """Also where the first batch comes from ``evaluate``, which counts it once."""
    for (losses, judged, averaged, created), (others, known, whole, once) in run(
        deferred_and_whole, str(tmp_path), ranks=2
    ):
        assert (losses, judged, created, once) == (others, known, 1, 1)
        assert all(torch.equal(averaged[name], value) for name, value in whole.items())


def resumed(directory: str) -> tuple[int, dict[str, Tensor], dict[str, Tensor], int]:
    """Save after two steps, load before the first batch of another engine, and go on."""
    _, engine = made()
    for step in range(2):
        engine.step(*batch(step))
    engine.save(directory, wait=True)
    engine.step(*batch(2))
    expected = engine.whole_state()
    engine.close()
    _, engine = made()
    engine.load(directory)
    begun = engine.steps
    engine.step(*batch(2))
    return begun, engine.whole_state(), expected, engine.steps


def test_state_loaded_before_the_first_batch_is_restored_with_it(tmp_path: Path) -> None:
    for begun, found, expected, steps in run(resumed, str(tmp_path), ranks=2):
        assert (begun, steps) == (2, 3)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
