"""The parity matrix: every way to spread a model, times what may be combined with it, against one process.

``python tests/support/matrix.py`` runs all of it; tests run a part. Cases on equally many ranks share their processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET, ConvNet, token_loss

import echelon
from echelon import Shard, Strategy, pipeline, replicate, split, stage
from echelon.distributed.tensor_layout import shares

STEPS, ROWS, MICRO = 3, 16, 4


# ---- models ----


class Transformer(nn.Module):
    """A weight tied between both ends, a mask that every block needs."""

    def __init__(self, vocab: int = 24, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, src_mask=mask)
        return self.head(self.norm(h))


class UNet(nn.Module):
    """Skips that go around the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.first(x)) * self.scale
        low = torch.tanh(self.down(wide))
        high = F.relu(self.up(low)) + 0.1 * self.scale
        return self.last(torch.cat([high, wide], 1)).mean((2, 3))


class Experts(nn.Module):
    """A mixture of experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        from echelon.nn import MoE

        self.first = nn.Linear(12, 16)
        self.experts = MoE(16, 4, hidden=24, top=2, capacity=2.0)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.last(h + self.experts(h))


MODELS: dict[str, type[nn.Module]] = {
    "convnet": ConvNet, "transformer": Transformer, "unet": UNet, "experts": Experts
}  # fmt: skip


def loss_of(model: str) -> Any:
    return token_loss if model == "transformer" else F.cross_entropy


def batch_of(model: str, step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(500 + step)
    if model == "transformer":
        return tuple(torch.randint(24, (rows, 6), generator=g) for _ in range(2))  # type: ignore[return-value]
    shape = {"convnet": (3, 8, 8), "unet": (2, 8, 8), "experts": (12,)}[model]
    return torch.randn(rows, *shape, generator=g), torch.randint(4, (rows,), generator=g)


# ---- layouts ----

STAGES: dict[str, list[list[str]]] = {  # modules by stage, for four stages; two stages take them in pairs
    "convnet": [["body.0", "body.1"], ["body.2"], ["body.3", "body.4"], ["body.5", "head"]],
    "transformer": [["blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm"]],
    "unet": [["first"], ["down"], ["up"], ["last"]],
    "experts": [["first"], ["experts"], ["last"]],
}
SPLITS = {
    "convnet": {"body.0": split(), "body.3": split("row"), "head": split()},
    "transformer": {"embed": split(), "blocks.*": split(), "head": split()},
    "unet": {"first": split(), "last": split("row")},
    "experts": {"experts": split(), "last": split()},
}
REPLICATED = {"convnet": "body.1", "transformer": "norm", "unet": "down", "experts": "first"}


@dataclass(frozen=True)
class Layout:
    """Layout of a model over ranks."""

    ranks: int
    stages: int = 1
    schedule: str = "1f1b"
    splits: int = 1
    spread: bool = False
    sequence: bool = False
    shard: Literal[1, 2, 3] | None = None
    within: int | None = None  # replicas in a group that shards by itself

    @property
    def copies(self) -> int:
        """Batches that make up a global batch."""
        depth = self.stages // 2 if self.schedule == "interleaved" else self.stages
        return self.ranks // depth // (1 if self.spread else self.splits)

    def marks(self, model: str) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        if self.stages > 1:
            found[""] = [pipeline(micro_batches=MICRO, schedule=self.schedule)]  # type: ignore[arg-type]
            parts = STAGES[model]
            for i, names in enumerate(parts):
                for name in names:
                    found.setdefault(name, []).append(stage(i * self.stages // len(parts)))
        if self.splits > 1:
            for pattern, mark in SPLITS[model].items():
                chosen = split(sequence=True) if self.sequence and pattern == "blocks.*" else mark
                found.setdefault(pattern, []).append(chosen)
        if self.spread:
            found.setdefault(REPLICATED[model], []).append(replicate())
        return dict(found)


LAYOUTS = {
    "dp2": Layout(2),
    "dp4": Layout(4),
    "split2": Layout(2, splits=2),
    "split3": Layout(3, splits=3),
    "sequence2": Layout(2, splits=2, sequence=True),
    "spread2": Layout(2, splits=2, spread=True),
    "gpipe2": Layout(2, stages=2, schedule="gpipe"),
    "1f1b2": Layout(2, stages=2),
    "1f1b4": Layout(4, stages=4),
    "interleaved2": Layout(2, stages=4, schedule="interleaved"),
    "zero-bubble2": Layout(2, stages=2, schedule="zero-bubble"),
    "zero-bubble4": Layout(4, stages=4, schedule="zero-bubble"),
    "shard1": Layout(2, shard=1),
    "shard2": Layout(2, shard=2),
    "shard3": Layout(3, shard=3),
    "pp2 x dp2": Layout(4, stages=2),
    "pp2 x dp2 zero-bubble": Layout(4, stages=2, schedule="zero-bubble"),
    "pp2 x dp2 interleaved": Layout(4, stages=4, schedule="interleaved"),
    "pp2 x split2": Layout(4, stages=2, splits=2),
    "pp2 x spread2": Layout(4, stages=2, splits=2, spread=True),
    "dp2 x split2": Layout(4, splits=2),
    "dp2 x spread2": Layout(4, splits=2, spread=True),
    "dp2 x sequence2": Layout(4, splits=2, sequence=True),
    "shard1 x split2": Layout(4, splits=2, shard=1),
    "shard2 x split2": Layout(4, splits=2, shard=2),
    "shard3 x split2": Layout(4, splits=2, shard=3),
    "shard3 x spread2": Layout(4, splits=2, spread=True, shard=3),
    "shard1 x pp2": Layout(4, stages=2, shard=1),
    "shard2 x pp2": Layout(4, stages=2, shard=2),
    "shard3 x pp2": Layout(4, stages=2, shard=3),
    "shard1 in groups": Layout(4, shard=1, within=2),
    "shard2 in groups": Layout(4, shard=2, within=2),
    "shard3 in groups": Layout(4, shard=3, within=2),
    "shard3 in groups x split2": Layout(8, splits=2, shard=3, within=2),
    "pp2 x dp2 x split2": Layout(8, stages=2, splits=2),
    "shard3 x pp2 x split2": Layout(8, stages=2, splits=2, shard=3),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"amp": "bf16"},
    "recompute": {"recompute": True},
    "merge": {"gradient_merge": 2},
    "clip": {"clip": 0.3},
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    model: str
    layout: str
    option: str = "plain"

    @property
    def name(self) -> str:
        return f"{self.model} | {self.layout} | {self.option}"

    @property
    def spread(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def tolerance(self) -> float:
        return 2e-2 if self.option == "bf16" else 1e-5


def all_cases() -> list[Case]:
    cases = [Case(model, layout, option) for model in MODELS for layout in LAYOUTS for option in OPTIONS]
    return [case for case in cases if _sensible(case)]


def _sensible(case: Case) -> bool:
    layout = case.spread
    if case.model == "experts":  # sharding and stages are tested on the others; three stages do not halve
        return layout.splits > 1 and layout.stages == 1 and not layout.sequence and case.option != "recompute"
    if layout.sequence and case.model != "transformer":
        return False
    return not (case.option == "recompute" and case.model == "unet")  # nothing in it repeats


# ---- training ----


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    error: str = ""


def train(cases: Iterable[Case]) -> dict[str, Trained]:
    """On this rank: each case in turn."""
    echelon.init()
    return {case.name: _train_one(case) for case in cases}


def _train_one(case: Case) -> Trained:
    layout, alone = case.spread, echelon.world_size() == 1
    torch.manual_seed(3)
    model = MODELS[case.model]()
    echelon.annotate(model, layout.marks(case.model))
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"fast": False, **OPTIONS[case.option]}  # on a GPU it would compute in bf16
    if layout.shard and not alone:
        options["shard"] = Shard(level=layout.shard, within=layout.within)
    within = layout.ranks // max(1, layout.copies // (layout.splits if layout.spread else 1))
    cluster = None if alone or layout.splits == 1 else echelon.cluster(average=within)
    engine = echelon.distribute(
        model, loss=loss_of(case.model), optimizer=made, strategy=Strategy(**options), cluster=cluster, log=QUIET
    )
    losses = []
    for step in range(STEPS * options.get("gradient_merge", 1)):
        batch = batch_of(case.model, step)
        mine = one_process(batch, layout) if alone else share(batch, engine.world.data_rank, engine.plan.replicas)
        losses.append(float(engine.step(*mine)))
    weights = engine.whole_state()
    engine.close()
    return Trained(losses, weights)


def share(batch: tuple[Tensor, ...], replica: int, replicas: int) -> tuple[Tensor, ...]:
    begin, end = shares(ROWS, replicas)[replica]
    return tuple(part[begin:end] for part in batch)


def one_process(batch: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, ...]:
    """The same rows in an order in which micro-batch i holds those of every replica's micro-batch i."""
    if layout.stages == 1:
        return batch
    rows = torch.arange(ROWS).view(layout.copies, MICRO, -1).transpose(0, 1).reshape(-1)
    return tuple(part[rows] for part in batch)


def difference(many: Trained, one: Trained) -> float:
    """The largest difference of losses and weights, in parts of what they are (of 1, where they are smaller)."""
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(many.losses, one.losses, strict=True))
    assert many.weights.keys() == one.weights.keys(), many.weights.keys() ^ one.weights.keys()
    for name, expected in one.weights.items():
        found = many.weights[name].double()
        assert found.shape == expected.shape, f"{name}: {found.shape}"
        scale = expected.double().abs().clamp(min=1.0)
        worst = max(worst, float(((found - expected.double()).abs() / scale).max()))
    return worst


def run_cases(cases: list[Case], timeout: float = 600) -> Mapping[str, tuple[list[Trained], Trained]]:
    """For each case, what all ranks found and what one process found."""
    alone = {case.name: replace(case) for case in cases}
    one = run(train, list(alone.values()), ranks=1, timeout=timeout)[0]
    found: dict[str, tuple[list[Trained], Trained]] = {}
    for ranks in sorted({case.spread.ranks for case in cases}):
        mine = [case for case in cases if case.spread.ranks == ranks]
        results = run(train, mine, ranks=ranks, timeout=timeout)
        found |= {case.name: ([result[case.name] for result in results], one[case.name]) for case in mine}
    return found


def judge(cases: list[Case]) -> dict[Case, tuple[float, str]]:
    """The largest difference of each case, and a word. Cases share processes; where one fails, each gets its own."""
    try:
        found = run_cases(cases) if cases else {}
    except AssertionError as error:
        if len(cases) == 1:
            return {cases[0]: (float("nan"), f"FAILED: {str(error).splitlines()[-1]}")}
        return {case: judged for one in cases for case, judged in judge([one]).items()}
    worst = {case: max(difference(each, found[case.name][1]) for each in found[case.name][0]) for case in cases}
    return {case: (most, "ok" if most <= case.tolerance else "DIFFERS") for case, most in worst.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name holds all of these words")
    words = parser.parse_args().words
    cases = [case for case in all_cases() if all(word in case.name for word in words)]
    failed = 0
    for layout in LAYOUTS:
        mine = [case for case in cases if case.layout == layout]
        for case, (worst, verdict) in judge(mine).items():
            failed += verdict != "ok"
            print(f"{case.name:<60} {worst:9.2e}  {verdict}", flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
