"""State moves between any two ways of spreading a model: what one layout saves another one goes on with.

``ECHELON_ALL_PAIRS=1 pytest tests/checkpoint/test_hybrid_state.py`` tries every pair of layouts on every model; without
it, a cycle through all of them and some pairs by lot.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
import torch.nn.functional as F
from harness import run
from matrix import Layout, batch_of, loss_of
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Amp, Checkpoint, Lamb, Shard, Strategy, pipeline, split, stage
from echelon.base.mesh import rank_groups
from echelon.checkpoint import Stored, export, find
from echelon.distributed.world import seed_everything
from echelon.parallel.objective import Objective


class Odd(matrix.Transformer):
    """Nothing divides: a tied table with an odd number of rows, a parameter without dimensions, one that is frozen."""

    def __init__(self) -> None:
        super().__init__(vocab=25)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.offset = nn.Parameter(torch.linspace(0.0, 1.0, 25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x) + self.offset


MODELS: dict[str, type[nn.Module]] = matrix.MODELS | {"transformer": Odd}


@dataclass(frozen=True)
class Uneven(Layout):
    """One rank holds three quarters of everything that is split."""

    def marks(self, model: str) -> dict[str, Any]:
        found = super().marks(model)
        return {name: [_heavier(mark) for mark in marks] for name, marks in found.items()}


def _heavier(mark: Any) -> Any:
    if not isinstance(mark, echelon.strategy.annotations.marks.Split):
        return mark
    return split(mark.how, gather=mark.gather, sequence=mark.sequence, weights=(3, 1))


pytestmark = pytest.mark.timeout(600)  # all moves share a few jobs, which the first test waits for

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
    "shard1 in groups": Layout(4, shard=1, within=2),
    "shard3 in groups": Layout(4, shard=3, within=2),
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


_SHORT = {
    "convnet": ["one", "spread2", "interleaved2", "shard3 on 3"],
    "transformer": ["one", "sequence2", "shard1 x sequence2", "shard2 x sequence2", "pp2 x split2"],
    "experts": ["split2", "dp2 x spread2", "shard3 x split2"],
}


def some_moves() -> list[Move]:
    """Every layout once as a beginning and once as an end, of the model that is quickest cut; and batch norm's
    statistics, tied weights, and experts, on their way."""
    lot = random.Random(17)
    moves = []
    for model, merge in [("convnet", 1), ("unet", 2), ("transformer", 2), ("experts", 2)]:
        cycle = _SHORT.get(model) or _of(model)
        cycle = lot.sample(cycle, len(cycle))
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
        options["shard"] = Shard(level=layout.shard, within=layout.within)
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
        engine.step(*own_share(engine, batch_of(model, step)))


def own_share(engine: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's part of a global batch."""
    plan = engine.plan
    line = next(line for line in rank_groups(plan.mesh, plan.order, plan.data_axes) if echelon.rank() in line)
    return matrix.share(batch, line.index(echelon.rank()), plan.replicas)


def begin(moves: Sequence[Move], directory: str) -> None:
    echelon.init()
    for move in {move.start: move for move in moves}.values():
        engine = make(move.model, LAYOUTS[move.first], gradient_merge=move.merge)
        go(engine, move.model, range(move.leg))
        engine.save(f"{directory}/{move.start}", wait=True)
        engine.close()


def go_on(moves: Sequence[Move], directory: str) -> dict[str, dict[str, Tensor]]:
    """Return the final model, as gathered on this rank."""
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
    """Training without interruption, in the micro-batches of the layouts it stands for."""

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
        """Return tensors under their names in a checkpoint."""
        named = dict(self.net.named_parameters())
        found = {f"model.{name}": p.detach() for name, p in named.items()}
        found |= {f"model.{name}": buffer for name, buffer in self.net.named_buffers()}
        for name, parameter in named.items():
            for field, value in self.optimizer.state.get(parameter, {}).items():
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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference shares two cores with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("layout", ["pp2 x split2", "shard3 x pp2"])
def test_weights_of_parts_are_exported_as_one_plain_model(layout: str, moved: Any, tmp_path: Path) -> None:
    directory, _ = moved
    for move in [move for move in MOVES if move.second == layout]:
        out = tmp_path / f"{move.model}.safetensors"
        export(f"{directory}/{move.name}", out)
        torch.manual_seed(99)
        fresh = MODELS[move.model]()
        fresh.load_state_dict(load_file(out), strict=True)
        expected = {f"model.{name}": value for name, value in fresh.named_parameters()}
        kept = stored(f"{directory}/{move.name}", *expected)
        assert_same({name: value.detach() for name, value in expected.items()}, kept, 0.0, move.name)


# ---- the same layout: bit for bit ----


class Dropping(nn.Module):
    """Dropout inside what is split and outside of it, batch norm, and layers enough for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.last = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)[:, None, :])[:, 0])


MARKS: dict[str, dict[str, Any]] = {
    "dp": {},
    "split": {"block": split(), "last.2": split()},
    "pp": {"": pipeline(micro_batches=2), "first": stage(0), "block": stage(0), "last": stage(1)},
}


@dataclass(frozen=True)
class Stop:
    """The point at which a run stops: after ``batches``; ``merge`` of them make an update."""

    ranks: int
    marks: str
    merge: int = 1
    shard: int | None = None


STOPS = [
    Stop(2, "split"), Stop(2, "split", 3), Stop(2, "dp", 1, 3), Stop(2, "dp", 3, 3), Stop(2, "dp", 3, 1),
    Stop(4, "pp"), Stop(4, "pp", 3), Stop(4, "pp", 3, 3),
]  # fmt: skip
BATCHES = 5  # when a run stops: in one epoch of three, between two checkpoints, and between two updates


def dropping(stop: Stop, directory: str, scramble: bool) -> tuple[Any, Any]:
    seed_everything(4)
    net = echelon.annotate(Dropping(), MARKS[stop.marks])
    made = torch.optim.AdamW(net.parameters(), lr=0.01)
    if scramble:  # what a run has drawn when it stopped must come from the checkpoint
        seed_everything(1000 + echelon.rank())
    engine = echelon.distribute(
        net,
        loss=F.cross_entropy,
        optimizer=made,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(made, [2, 6], 0.3),
        strategy=Strategy(gradient_merge=stop.merge, shard=stop.shard),
        checkpoint=Checkpoint(dir=directory, every=2),
        log=QUIET,
    )
    g = torch.Generator().manual_seed(9)
    data = torch.randn(24, 6, generator=g), torch.randint(3, (24,), generator=g)
    return engine, engine.loader(data, batch_size=4)


def all_state(engine: Any, directory: str) -> dict[str, Tensor]:
    """Return all state of the run; a random stream is stored as the numbers it gives next."""
    path = engine.save(directory, wait=True)
    found = stored(path, "model.", "optimizer.")
    engine.close()
    return found | {"chance": torch.rand(3)}


def to_the_end(stop: Stop, directory: str, scramble: bool = False) -> tuple[int, dict[str, Tensor]]:
    """Three epochs; how many steps there were already, and what the run has become."""
    engine, loader = dropping(stop, directory, scramble)
    before = engine.steps
    for _ in loader.epochs(3):
        for x, y in loader:
            engine.step(x, y)
    return before, all_state(engine, f"{directory}/end")


def stopping(stop: Stop, directory: str) -> None:
    engine, loader = dropping(stop, directory, scramble=False)
    batches = (batch for _ in loader.epochs(3) for batch in loader)
    for _, batch in zip(range(BATCHES), batches, strict=False):
        engine.step(*batch)
    if stop.merge > 1:
        engine.save(wait=True)  # between two updates; else from the last that was kept by itself
    engine.close()


def stopped_and_resumed(stops: Sequence[Stop], directory: str) -> list[Any]:
    echelon.init()
    found = []
    for number, stop in enumerate(stops):
        _, through = to_the_end(stop, f"{directory}/through-{number}")
        stopping(stop, f"{directory}/{number}")
        found.append((through, *to_the_end(stop, f"{directory}/{number}", scramble=True)))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_hybrid_resume_in_same_layout_ends_bit_identical(ranks: int, tmp_path: Path) -> None:
    """A run that stops and resumes in its layout ends bit for bit like an uninterrupted one."""
    stops = [stop for stop in STOPS if stop.ranks == ranks]
    for rank, results in enumerate(run(stopped_and_resumed, stops, str(tmp_path), ranks=ranks, timeout=180)):
        for stop, (through, before, resumed) in zip(stops, results, strict=True):
            assert before == (BATCHES // stop.merge if stop.merge > 1 else BATCHES // 2 * 2), f"{stop}, rank {rank}"
            assert_same(resumed, through, 0.0, f"{stop}, rank {rank}")


def dropping_differently(directory: str) -> dict[str, Tensor]:
    """Train as two replicas, go on as two halves of one: what both hold must stay one."""
    echelon.init(seed=4)
    engine, _ = dropping(Stop(2, "dp"), f"{directory}/dp", scramble=False)
    x, y = torch.ones(4, 6) * (1 + echelon.rank()), torch.arange(4) % 3
    engine.step(x, y)
    engine.save(wait=True)
    engine.close()
    engine, _ = dropping(Stop(2, "split"), f"{directory}/split", scramble=True)
    engine.load(f"{directory}/dp")
    engine.step(x / (1 + echelon.rank()), y)
    held = {name: p.detach().clone() for name, p in engine.model.named_parameters() if "block" not in name}
    engine.close()
    return {name: value for name, value in held.items() if "last.2" not in name}


def test_replicas_resumed_as_split_halves_draw_same_random(tmp_path: Path) -> None:
    """Replicas that are resumed as halves of a split draw the same random numbers."""
    first, second = run(dropping_differently, str(tmp_path))
    assert_same(first, second, 0.0, "dp2 -> split2")


# ---- optimizers that go by norms of whole parameters; overflows ----

NORMED = ["split 3:1", "spread2", "pp2", "shard1", "shard3", "shard3 on 3", "shard3 x split2", "shard3 x pp2",
          "shard3 in groups"]  # fmt: skip


def by_norms(layouts: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    echelon.init()
    found = {}
    for name in layouts:
        for strategy, optimizer, settings in (("lars", "sgd", True), ("lamb", "adamw", Lamb(eps=1e-3))):
            engine = make("transformer", LAYOUTS[name], optimizer, **{strategy: settings})
            go(engine, "transformer", range(3))
            found[f"{strategy} {name}"] = engine.whole_state()
            engine.close()
    return found


def test_lars_lamb_use_whole_parameter_norms_in_every_layout() -> None:
    one = run(by_norms, ["one"], ranks=1)[0]
    for ranks in (2, 3, 4):
        here = [name for name in NORMED if LAYOUTS[name].ranks == ranks]
        for rank, found in enumerate(run(by_norms, here, ranks=ranks)):
            for case, weights in found.items():
                assert_same(weights, one[f"{case.split()[0]} one"], 1e-5, f"{case}, rank {rank}")


def overflowing(layouts: Sequence[str]) -> list[tuple[int, bool, bool]]:
    """One gradient on one rank is infinite in the second step: who skips it, and who steps in the third."""
    echelon.init()
    found = []
    for name in layouts:
        engine = make("transformer", LAYOUTS[name], amp=Amp(loss_scale="dynamic", init_scale=64.0))
        go(engine, "transformer", [0])
        before = engine.whole_state()
        own = dict(engine.model.named_parameters())["blocks.3.linear2.weight"]
        spoils = echelon.rank() == echelon.world_size() - 1
        handle = own.register_hook(lambda gradient: gradient * torch.inf) if spoils else None
        go(engine, "transformer", [1])
        skipped = engine.whole_state()
        if handle is not None:
            handle.remove()
        go(engine, "transformer", [2])
        stepped = engine.whole_state()
        same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in ((before, skipped), (skipped, stepped))]
        found.append((engine.skipped, *same))
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: int) -> None:
    names = {2: ["pp2", "split2", "spread2", "shard1"], 4: ["pp2 x dp2", "pp2 x split2", "shard1 x pp2"]}[ranks]
    for found in run(overflowing, names, ranks=ranks):
        assert dict(zip(names, found, strict=True)) == dict.fromkeys(names, (1, True, False))
