"""Adapters under every layout: the losses and adapters of one process, computed from merged weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Lora, Strategy
from echelon.parallel.lora.adapt import adapt

WORDS, WIDTH, HEADS, ROWS, STEPS = 24, 16, 4, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.late_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (_heads(layer(h)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.late_norm(x))))


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Decoder(nn.Module):
    """A small language model, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


LORA = Lora(
    rank=2, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), modules_to_save=("head",)
)
COLUMNS, ROW = echelon.split("column"), echelon.split("row")
SPLIT = {
    **{f"layers.*.{name}": COLUMNS for name in ("q_proj", "k_proj", "v_proj", "up_proj")},
    **{f"layers.*.{name}": ROW for name in ("o_proj", "down_proj")},
}
SEQUENCE = SPLIT | {f"layers.*.{name}": echelon.split("row", sequence=True) for name in ("o_proj", "down_proj")}
STAGES = {"": echelon.pipeline(micro_batches=2), "layers.0-1": echelon.stage(0), "layers.2-3": echelon.stage(1)}


@dataclass(frozen=True)
class Case:
    """A layout to train in. ``size`` is that of a slice of the cluster."""

    marks: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None


TWO = [
    Case(),
    Case(strategy={"shard": 1, "clip": 0.3}),
    Case(strategy={"shard": 2, "gradient_merge": 2}),
    Case(strategy={"shard": 3, "clip": 0.3}),
    Case(strategy={"shard": 3, "recompute": True}),
    Case(SPLIT, {"clip": 0.3}),
    Case(SEQUENCE),
    Case(SPLIT | {"embed": echelon.replicate()}),
    Case(STAGES, {"clip": 0.3}),
]
FOUR = [
    Case(SPLIT, {"shard": 3, "clip": 0.3}, size=2),
    Case(SPLIT | STAGES, {"clip": 0.3}),
    Case(STAGES, {"shard": 3}),
    Case(SPLIT, {"shard": 2}, size=2),
]


def made() -> Decoder:
    torch.manual_seed(3)
    return Decoder()


def ids_of(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, 7), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    heads = [p for name, p in model.named_parameters() if name == "head.weight"]
    others = [p for name, p in model.named_parameters() if name != "head.weight"]
    return torch.optim.AdamW([{"params": others}, {"params": heads, "lr": 1e-3}], lr=1e-2, eps=1e-4)


@dataclass
class Trained:
    losses: list[float]
    adapters: dict[str, Tensor]


def train_all(cases: list[Case], directory: Path) -> list[Trained]:
    echelon.init()
    return [train(case, directory / str(number)) for number, case in enumerate(cases)]


def train(case: Case, directory: Path) -> Trained:
    model = echelon.annotate(made(), case.marks)
    strategy = Strategy(fast=False, lora=LORA, **case.strategy)
    cluster = echelon.cluster(average=case.size) if case.size else None
    optimizer = optimizer_of(model)
    engine = echelon.distribute(model, optimizer=optimizer, strategy=strategy, cluster=cluster, log=QUIET)
    merge, replicas, at = engine.plan.gradient_merge, engine.plan.replicas, engine.world.data_rank
    losses = []
    for step in range(STEPS):
        for part in ids_of(step).chunk(merge):
            loss = engine.step(part.chunk(replicas)[at])
        losses.append(float(loss))
    frozen = {name for name, p in made().named_parameters() if name != "head.weight"}
    assert not {p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad}
    assert not any(p.grad is not None for name, p in model.named_parameters() if name in frozen)
    engine.save_adapter(directory)
    whole = {name: value for name, value in engine.whole_state().items() if name not in frozen}
    engine.close()
    return Trained(losses, whole)


def train_merged(clip: float | None = None) -> Trained:
    """Train one process whose layers have the weight ``W + B A * scale``; it has no adapted layers at all."""
    model, adapted = made(), made()
    adapt(adapted, LORA, {"main": optimizer_of(adapted)}, seed=0)
    adapters = {n: p.detach().clone().requires_grad_() for n, p in adapted.named_parameters() if p.requires_grad}
    heads = [adapters["head.weight"]]
    others = [p for name, p in adapters.items() if name != "head.weight"]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": heads, "lr": 1e-3}], lr=1e-2, eps=1e-4)
    base = {name: p.detach() for name, p in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        weights = dict(base) | {"head.weight": adapters["head.weight"]}
        for name, low in adapters.items():
            if name.endswith("lora_A.weight"):
                layer = name.removesuffix("lora_A.weight")
                weights[f"{layer}weight"] = base[f"{layer}weight"] + 3.0 * adapters[f"{layer}lora_B.weight"] @ low
        loss = torch.func.functional_call(model, weights, (ids_of(step),))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(adapters.values()), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, {name: p.detach() for name, p in adapters.items()})


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_adapters_of_every_layout_equal_one_process(ranks: int, cases: list[Case], tmp_path: Path) -> None:
    """Losses, adapters and their files are those of merged weights in one process, whatever the layout."""
    results = run(train_all, cases, tmp_path, ranks=ranks)
    one = {clip: train_merged(clip) for clip in {case.strategy.get("clip") for case in cases}}
    for number, case in enumerate(cases):
        expected = one[case.strategy.get("clip")]
        saved = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        for trained in (result[number] for result in results):
            for name, value in expected.adapters.items():
                torch.testing.assert_close(trained.adapters[name], value, rtol=1e-5, atol=1e-5, msg=f"{case}: {name}")
                assert torch.equal(saved[f"base_model.model.{name}"], trained.adapters[name])
            assert trained.adapters.keys() == expected.adapters.keys()
            if case.strategy.get("gradient_merge", 1) == 1:
                torch.testing.assert_close(trained.losses, expected.losses, rtol=1e-5, atol=1e-5, msg=str(case))
