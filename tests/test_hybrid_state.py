"""State moves between any two ways of spreading a model: what one layout saves another one goes on with.

``ECHELON_ALL_PAIRS=1 pytest tests/test_hybrid_state.py`` tries every pair of layouts on every model; without it, a
cycle through all of them and some pairs by lot.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from harness import run
from matrix import MODELS, Layout, batch_of, loss_of
from torch import Tensor
from zoo import QUIET

import echelon
from echelon import Strategy, split
from echelon.checkpoint import Stored, find
from echelon.objective import Objective


@dataclass(frozen=True)
class Uneven(Layout):
    """One rank holds three quarters of everything that is split."""

    def marks(self, model: str) -> dict[str, Any]:
        found = super().marks(model)
        return {name: [_heavier(mark) for mark in marks] for name, marks in found.items()}


def _heavier(mark: Any) -> Any:
    if not isinstance(mark, echelon.marks.Split):
        return mark
    return split(mark.how, gather=mark.gather, sequence=mark.sequence, weights=(3, 1))


LAYOUTS: dict[str, Layout] = {
    "one": Layout(1),
    "dp2": Layout(2),
    "split2": Layout(2, splits=2),
    "split 3:1": Uneven(2, splits=2),
    "spread2": Layout(2, splits=2, spread=True),
    "pp2": Layout(2, stages=2),
    "interleaved2": Layout(2, stages=4, schedule="interleaved"),
    "shard1": Layout(2, shard=1),
    "shard2": Layout(2, shard=2),
    "shard3": Layout(2, shard=3),
    "shard1 on 3": Layout(3, shard=1),
    "shard2 on 3": Layout(3, shard=2),
    "shard3 on 3": Layout(3, shard=3),
    "pp2 x dp2": Layout(4, stages=2),
    "dp2 x split2": Layout(4, splits=2),
    "pp2 x split2": Layout(4, stages=2, splits=2),
    "shard3 x split2": Layout(4, splits=2, shard=3),
    "shard3 x pp2": Layout(4, stages=2, shard=3),
    "sequence2": Layout(2, splits=2, sequence=True),
    "dp2 x spread2": Layout(4, splits=2, spread=True),
    "shard1 x sequence2": Layout(4, splits=2, sequence=True, shard=1),
    "shard2 x sequence2": Layout(4, splits=2, sequence=True, shard=2),
    "shard1 x pp2": Layout(4, stages=2, shard=1),
    "shard3 x spread2": Layout(4, splits=2, spread=True, shard=3),
}


@dataclass(frozen=True)
class Move:
    """From one layout to another."""

    model: str
    first: str
    second: str
    merge: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}: {self.first} -> {self.second}{', merging' if self.merge > 1 else ''}"

    @property
    def start(self) -> tuple[str, str, int]:
        return self.model, self.first, self.merge

    @property
    def leg(self) -> int:
        """Calls of step() before the checkpoint, and after it: when merging, it falls between two updates."""
        return 2 if self.merge == 1 else 3


def _of(model: str) -> list[str]:
    if model == "experts":  # three stages do not halve
        return [name for name, layout in LAYOUTS.items() if layout.stages == 1 and not layout.sequence]
    return [name for name, layout in LAYOUTS.items() if model == "transformer" or not layout.sequence]


def all_moves() -> list[Move]:
    return [
        Move(model, *pair, merge)
        for model in MODELS
        for pair in itertools.product(_of(model), repeat=2)
        for merge in (1, 2)
    ]


def some_moves() -> list[Move]:
    """Every layout of every model once as a beginning and once as an end."""
    lot = random.Random(17)
    moves = []
    for model, merge in [*((model, 1) for model in MODELS), ("transformer", 2), ("experts", 2)]:
        cycle = _of(model)
        lot.shuffle(cycle)
        moves += [Move(model, *pair, merge) for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return moves


MOVES = all_moves() if os.environ.get("ECHELON_ALL_PAIRS") else some_moves()


# ---- on ranks ----


def make(model: str, layout: Layout, optimizer: str = "adamw", **options: Any) -> Any:
    torch.manual_seed(3)
    net = MODELS[model]()
    echelon.annotate(net, layout.marks(model))
    made = OPTIMIZERS[optimizer](net.parameters())
    if layout.shard:
        options["shard"] = layout.shard
    within = layout.ranks // max(1, layout.copies // (layout.splits if layout.spread else 1))
    cluster = echelon.cluster(average=within) if layout.splits > 1 else None
    return echelon.distribute(
        net, loss=loss_of(model), optimizer=made, strategy=Strategy(**options), cluster=cluster, log=QUIET
    )


OPTIMIZERS: dict[str, Any] = {
    # With the default eps, an entry whose gradient is only rounding noise takes steps of full size.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def go(engine: Any, model: str, steps: Iterable[int]) -> None:
    for step in steps:
        engine.step(*matrix.share(batch_of(model, step), engine._replica, engine.plan.replicas))


def begin(moves: Sequence[Move], directory: str) -> None:
    echelon.init()
    for move in {move.start: move for move in moves}.values():
        engine = make(move.model, LAYOUTS[move.first], gradient_merge=move.merge)
        go(engine, move.model, range(move.leg))
        engine.save(f"{directory}/{move.start}", wait=True)
        engine.close()


def go_on(moves: Sequence[Move], directory: str) -> dict[str, dict[str, Tensor]]:
    """What the model is in the end, as this rank is told."""
    echelon.init()
    found = {}
    for move in moves:
        engine = make(move.model, LAYOUTS[move.second], gradient_merge=move.merge)
        engine.load(f"{directory}/{move.start}")
        go(engine, move.model, range(move.leg, 2 * move.leg))
        engine.save(f"{directory}/{move.name}", wait=True)
        found[move.name] = engine.whole_state()
        engine.close()
    return found


# ---- in one process, in plain torch ----


class Reference:
    """Training that nobody interrupts, in the micro-batches of the layouts it stands for."""

    def __init__(self, model: str, optimizer: Any = OPTIMIZERS["adamw"]) -> None:
        torch.manual_seed(3)
        self.name, self.net = model, MODELS[model]()
        self._objective = Objective(self.net, loss_of(model), None, torch.device("cpu"))
        self.optimizer = optimizer(self.net.parameters())

    def go(self, layout: Layout, steps: Iterable[int], merge: int = 1) -> None:
        for step in steps:
            whole = matrix.one_process(batch_of(self.name, step), layout)
            count = matrix.MICRO if layout.stages > 1 else 1
            for rows in zip(*(part.chunk(count) for part in whole), strict=True):
                (self._objective(rows)[1] / count / merge).backward()  # type: ignore[no-untyped-call]
            if (step + 1) % merge == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint names them."""
        named = dict(self.net.named_parameters())
        found = {f"model.{name}": p.detach() for name, p in named.items()}
        found |= {f"model.{name}": buffer for name, buffer in self.net.named_buffers()}
        for name, parameter in named.items():
            for field, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"optimizer.main.{name}.{field}"] = value
        return found


def reference(move: Move, known: dict[Any, dict[str, Tensor]]) -> dict[str, Tensor]:
    first, second = LAYOUTS[move.first], LAYOUTS[move.second]
    key = (move.model, move.merge, *((layout.stages > 1) * layout.copies for layout in (first, second)))
    if key not in known:
        made = Reference(move.model)
        made.go(first, range(move.leg), move.merge)
        made.go(second, range(move.leg, 2 * move.leg), move.merge)
        known[key] = made.tensors()
    return known[key]


def stored(path: str | Path, *prefixes: str) -> dict[str, Tensor]:
    checkpoint = Stored(find(path))
    return {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith(prefixes)}


def plain_state(path: str | Path) -> dict[str, Tensor]:
    """The model of a checkpoint, as its ``state_dict()`` would be: tied weights under each of their names."""
    weights = {name.removeprefix("model."): value for name, value in stored(path, "model.").items()}
    return weights | {second: weights[first] for second, first in Stored(find(path)).facts["aliases"].items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, case: str) -> None:
    assert found.keys() == expected.keys(), f"{case}: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{case}: {name} has shape {tuple(found[name].shape)}"
        scale = value.double().abs().clamp(min=1.0)
        worst = float(((found[name].double() - value.double()).abs() / scale).max()) if value.numel() else 0.0
        assert worst <= tolerance, f"{case}: {name} differs by {worst:.2e}"


# ---- any layout to any other ----


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[dict[str, Tensor]]]]:
    """Saved in all first layouts, gone on with in all second ones; jobs of one size share their processes."""
    directory = str(tmp_path_factory.mktemp("moves"))
    sizes = sorted({layout.ranks for layout in LAYOUTS.values()})
    for ranks in sizes:
        run(begin, [m for m in MOVES if LAYOUTS[m.first].ranks == ranks], directory, ranks=ranks, timeout=300)
    found: dict[str, list[dict[str, Tensor]]] = {}
    for ranks in sizes:
        moves = [move for move in MOVES if LAYOUTS[move.second].ranks == ranks]
        results = run(go_on, moves, directory, ranks=ranks, timeout=1200)
        found |= {move.name: [result[move.name] for result in results] for move in moves}
    return directory, found


_known: dict[Any, dict[str, Tensor]] = {}


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_what_one_layout_saves_another_goes_on_with(move: Move, moved: Any) -> None:
    directory, found = moved
    kept = stored(f"{directory}/{move.name}", "model.", "optimizer.")
    assert_same(kept, reference(move, _known), 1e-5, move.name)
    plain = plain_state(f"{directory}/{move.name}")
    for rank, whole in enumerate(found[move.name]):
        assert_same(whole, plain, 0.0, f"{move.name}, rank {rank}")
