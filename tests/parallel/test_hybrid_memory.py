"""Memory of a rank: its shard, its stage, and no more micro-batches than its schedule needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from zoo import QUIET

import echelon
from echelon import Strategy, pipeline, stage
from echelon.engine.engine import Engine

WIDTH, DEPTH, MICRO = 64, 8, 8


class Tower(nn.Module):
    """Layers of one size: every stage and every shard has its fair part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4  # bytes
BATCH = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH), torch.zeros(16, WIDTH)


def tower(marks: dict[str, Any] | None = None, **options: Any) -> Engine:
    net = echelon.annotate(Tower(), marks or {})
    made = torch.optim.Adam(net.parameters(), lr=0.01)
    return echelon.distribute(net, loss=F.mse_loss, optimizer=made, strategy=Strategy(**options), log=QUIET)


def live_bytes() -> int:
    """All memory of tensors that anything refers to."""
    storages = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors() -> Iterator[Tensor]:
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            yield thing
            if thing.grad is not None:  # held by the tensor alone
                yield thing.grad


# ---- shards ----


def sharded(level: int | None, merge: int) -> tuple[dict[str, int], int]:
    """Between two steps: what the shards say they hold, and what is alive in this process beyond what was before."""
    echelon.init()
    before = live_bytes()
    engine = tower(shard=level, gradient_merge=merge)
    for _ in range(2 * merge + (merge > 1)):  # when merging, between two updates: gradients are alive
        engine.step(*BATCH)
    shards = engine._parts.shards if engine._parts else None
    told = shards.memory() if shards else {}
    alive = live_bytes() - before
    engine.close()
    return told, alive


@pytest.mark.parametrize("ranks", [2, 4])
def test_shard_level_three_rank_holds_only_its_part(ranks: int) -> None:
    """At level 3 a rank holds only its part of the parameters, gradients and optimizer state."""
    part = PARAMETERS / ranks
    for told, alive in run(sharded, 3, 2, ranks=ranks):
        assert told["parameters"] == pytest.approx(part, rel=0.1)
        assert told["gradients"] == pytest.approx(part, rel=0.1)
        assert told["optimizer"] == pytest.approx(2 * part, rel=0.1)
        held = told["parameters"] + told["gradients"] + told["optimizer"]
        assert alive == pytest.approx(held, rel=0.1), "something else is alive that the shards do not speak of"


def test_the_measure_sees_whole_models_where_nothing_is_sharded() -> None:
    """Parameters, gradients and two moments; and the buckets that merged gradients will travel in."""
    for _, alive in run(sharded, None, 2, ranks=2):
        assert 4 * PARAMETERS <= alive <= 5.2 * PARAMETERS


# ---- stages ----


def stages_of(stages: int, schedule: str) -> dict[str, Any]:
    marks: dict[str, Any] = {"": pipeline(micro_batches=MICRO, schedule=schedule)}  # type: ignore[arg-type]
    return marks | {f"layers.{i}": stage(i * stages // DEPTH) for i in range(DEPTH)}


def staged(stages: int) -> tuple[list[str], int, int]:
    """Names and bytes of parameters that are here, bytes of the optimizer's state, and all that is alive."""
    echelon.init()
    before = live_bytes()
    engine = tower(stages_of(stages, "1f1b"))
    for _ in range(2):
        engine.step(*BATCH)
    held = {name: p for name, p in engine.model.named_parameters() if type(p.data) is Tensor}
    state = [value for per in engine.optimizers["main"].state.values() for value in per.values()]
    kept = sum(value.untyped_storage().nbytes() for value in state if value.dim())
    alive = live_bytes() - before
    engine.close()
    return sorted(held), kept, alive


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_rank_holds_its_stage_only(ranks: int) -> None:
    for rank, (names, kept, alive) in enumerate(run(staged, ranks, ranks=ranks)):
        mine = range(rank * DEPTH // ranks, (rank + 1) * DEPTH // ranks)
        assert names == sorted(f"layers.{i}.{kind}" for i in mine for kind in ("weight", "bias"))
        assert kept == 2 * PARAMETERS / ranks
        # with gradients, which stay readable until the next step; and a little that messages are put into
        assert alive <= 4 * PARAMETERS / ranks * 1.25


def activations(stages: int, schedules: Sequence[str]) -> list[int]:
    """The most bytes of activations that were alive at one time, by schedule."""
    echelon.init()
    return [_most_saved(tower(stages_of(stages, schedule))) for schedule in schedules]


def _most_saved(engine: Engine) -> int:
    engine.step(*BATCH)
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters() if type(p.data) is Tensor}
    saved = Saved(weights)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        engine.step(*BATCH)
    engine.close()
    return saved.most


class Saved:
    """Counts the bytes that autograd keeps for backward."""

    def __init__(self, others: set[int]) -> None:
        self._others, self.now, self.most = others, 0, 0

    def pack(self, tensor: Tensor) -> Kept:
        real = not isinstance(tensor, FakeTensor)  # glue around other stages keeps stand-ins, which have no memory
        mine = real and tensor.untyped_storage().data_ptr() not in self._others
        return Kept(tensor, self, tensor.numel() * tensor.element_size() if mine else 0)

    def count(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Kept:
    """One tensor that autograd keeps, counted as long as it lives."""

    def __init__(self, tensor: Tensor, saved: Saved, size: int) -> None:
        self.tensor, self._saved, self._size = tensor, saved, size
        saved.count(size)

    def __del__(self) -> None:
        self._saved.count(-self._size)


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_keeps_at_most_as_many_micro_batches_as_stages(stages: int) -> None:
    """GPipe keeps all of them. Rank r of p keeps p - r, and the one it works on."""
    for rank, (gpipe, ours) in enumerate(run(activations, stages, ["gpipe", "1f1b"], ranks=stages)):
        assert ours > 0
        one = gpipe / MICRO
        assert ours <= (stages - rank + 1) * one, f"rank {rank}: {ours / one:.1f} micro-batches alive"
