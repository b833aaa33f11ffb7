"""Moving averages of weights: torch's AveragedModel in one process, whatever the layout."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
import torch.nn.functional as F
from harness import errors, run, tolerance_of
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import QUIET

import echelon
from echelon import Checkpoint, Strategy
from echelon.checkpoint import export
from echelon.distributed.local_state import LocalState, grouped_names
from echelon.parallel.ema_weights import Ema, EmaWeights

DECAY = 0.9


@dataclass
class Followed:
    """Result of a run with averaged weights."""

    averages: dict[str, Tensor]
    evaluations: list[float]
    weights: dict[str, Tensor]
    steps: list[float] = field(default_factory=list)


def follow_layouts(model: str, layouts: list[str]) -> dict[str, Followed]:
    """On this rank: train by each layout in turn, with the engine's own average."""
    echelon.init()
    return {name: _follow(model, matrix.LAYOUTS[name]) for name in layouts}


def _follow(kind: str, layout: matrix.Layout, **options: Any) -> Followed:
    alone = echelon.world_size() == 1
    torch.manual_seed(3)
    model = matrix.MODELS[kind]().to(echelon.device())
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if alone else None
    echelon.annotate(model, layout.marks(kind))
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chosen = {"fast": False, **options} | ({"shard": layout.shard} if layout.shard and not alone else {})
    within = layout.ranks // max(1, layout.copies // (layout.splits if layout.spread else 1))
    cluster = None if alone or layout.splits == 1 else echelon.cluster(average=within)
    engine = echelon.distribute(
        model, loss=matrix.loss_of(kind), optimizer=made, strategy=Strategy(**chosen), cluster=cluster, log=QUIET
    )
    engine.ema(DECAY)
    losses, evaluations = [], []
    for step in range(4):
        batch = matrix.batch_of(kind, step)
        mine = matrix.one_process(batch, layout) if alone else _share(batch, engine)
        losses.append(float(engine.step(*mine)))
        if plain is not None:
            plain.update_parameters(model)
        if step == 2:  # training goes on from its own weights afterwards
            evaluations = _evaluate(engine, plain, kind)
    weights, averages = engine.whole_state(), engine.ema.whole_state()
    if plain is not None:
        torch.testing.assert_close(averages, {**plain.module.state_dict()}, rtol=0, atol=1e-7, check_device=False)
    engine.close()
    return Followed(averages, evaluations, weights, losses)


def _evaluate(engine: echelon.Engine, plain: AveragedModel | None, kind: str) -> list[float]:
    data = matrix.batch_of(kind, 77)
    found = [engine.evaluate(data, batch_size=4, ema=True)["loss"]]
    with engine.ema.applied():
        found.append(engine.evaluate(data, batch_size=4)["loss"])
    found.append(engine.evaluate(data, batch_size=4)["loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-7)
    assert found[0] != found[2]
    if plain is not None:
        plain.eval()
        x, y = (part.to(echelon.device()) for part in data)
        with torch.no_grad():
            assert float(matrix.loss_of(kind)(plain(x), y)) == pytest.approx(found[0], abs=tolerance_of(1e-6))
    return found


def _share(batch: tuple[Tensor, ...], engine: echelon.Engine) -> tuple[Tensor, ...]:
    return matrix.share(batch, engine.world.data_rank, engine.plan.replicas)


CASES = [
    ("convnet", 2, ["dp2", "shard1", "shard2", "split2", "1f1b2"]),
    ("transformer", 2, ["spread2", "interleaved2", "split2"]),
    ("transformer", 3, ["shard3"]),
    ("transformer", 4, ["shard3 x split2", "shard1 x pp2", "pp2 x dp2"]),
    ("convnet", 4, ["shard3 x pp2", "pp2 x split2"]),
]


@pytest.mark.parametrize(("model", "ranks", "layouts"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_average_equals_torchs_in_one_process(model: str, ranks: int, layouts: list[str]) -> None:
    expected = run(follow_layouts, model, layouts, ranks=1)[0]
    for found, name in itertools.product(run(follow_layouts, model, layouts, ranks=ranks), layouts):
        _compare(found[name], expected[name])


def _compare(found: Followed, expected: Followed) -> None:
    torch.testing.assert_close(found.steps, expected.steps, rtol=0, atol=tolerance_of(2e-6))
    torch.testing.assert_close(found.averages, expected.averages, rtol=0, atol=tolerance_of(1e-6))
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=tolerance_of(2e-6))
    torch.testing.assert_close(found.evaluations, expected.evaluations, rtol=0, atol=tolerance_of(1e-6))


# ---- checkpoints ----


def keep_average(directory: str, layout: str, steps: range, *, begin: bool = True) -> Any:
    """Train a transformer, go on from what is in the directory, and save at the end."""
    echelon.init()
    how = matrix.LAYOUTS[layout]
    torch.manual_seed(3)
    model = matrix.Transformer()
    echelon.annotate(model, how.marks("transformer"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    many = echelon.world_size() > 1
    strategy = Strategy(fast=False, **({"shard": how.shard} if how.shard and many else {}))
    kept = Checkpoint(dir=directory, asynchronous=False)
    engine = echelon.distribute(
        model, loss=matrix.token_loss, optimizer=optimizer, strategy=strategy, checkpoint=kept, log=QUIET
    )
    said: list[str] = []
    engine.ema._say = said.append
    if begin:
        engine.ema(DECAY)
    for step in steps:
        batch = matrix.batch_of("transformer", step)
        engine.step(*(_share(batch, engine) if many else batch))
    engine.save()
    state = engine.ema.whole_state() if begin else {}
    return state, engine.ema.updates if begin else 0, said


def test_average_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Five steps in one process, or three on shards, one in a pipeline (cut by its first batch) and one on a split."""
    expected, updates, _ = run(keep_average, str(tmp_path / "one"), "dp2", range(5), ranks=1)[0]
    parts = str(tmp_path / "parts")
    run(keep_average, parts, "shard3", range(3), ranks=3)
    run(keep_average, parts, "1f1b2", range(3, 4), ranks=2)
    found, count, said = run(keep_average, parts, "split2", range(4, 5), ranks=2)[0]
    assert count == updates == 5
    assert said == ["ema: resumed after 4 updates"]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance_of(1e-6))
    export(parts, tmp_path / "average.safetensors", ema=True)
    torch.testing.assert_close(load_file(tmp_path / "average.safetensors"), found, rtol=0, atol=0)


def test_average_that_is_not_requested_is_reported(tmp_path: Path) -> None:
    run(keep_average, str(tmp_path), "dp2", range(1), ranks=1)
    _, _, said = run(keep_average, str(tmp_path), "dp2", range(1, 2), ranks=1, begin=False)[0]
    assert [line.split(";")[1] for line in said] == [" call engine.ema(...) after distribute() to continue the average"]


# ---- replicas that step alone, low_memory weights, several optimizers ----


def step_alone() -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    """LocalSGD: the average of the replicas' mean, by the engine and by hand."""
    echelon.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Strategy(localsgd=echelon.LocalSgd(k_steps=3), fast=False)
    engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy, log=QUIET)
    engine.ema(DECAY)
    by_hand: dict[str, Tensor] = {}
    for step in range(5):
        g = torch.Generator().manual_seed(step * 2 + echelon.rank())
        engine.step(torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g))
        mean = engine.whole_state()
        for name, value in mean.items():
            moves = "weight" in name or "bias" in name
            by_hand[name] = by_hand[name].lerp(value, 1 - DECAY) if step and moves else value
    g = torch.Generator().manual_seed(99)
    data = torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)
    loss = engine.evaluate(data, ema=True)["loss"]
    state = engine.ema.whole_state()
    after = engine.whole_state()
    torch.testing.assert_close(after, mean)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval().requires_grad_(False)
    whole.load_state_dict(state)
    return state, by_hand, loss, float(F.cross_entropy(whole(data[0]), data[1]))


def test_average_of_replicas_that_step_alone_is_their_means() -> None:
    (state, by_hand, loss, expected), other = run(step_alone)
    torch.testing.assert_close(state, by_hand, rtol=0, atol=1e-6)
    torch.testing.assert_close(other[0], state, rtol=0, atol=0)
    assert loss == pytest.approx(expected, abs=tolerance_of(1e-6))


def follow_low_memory() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    echelon.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = echelon.distribute(
        model, loss=F.cross_entropy, optimizer=optimizer, strategy=Strategy(low_memory=True), log=QUIET
    )
    engine.ema(DECAY)
    low_memory: Any = engine.optimizers["main"]
    by_hand: dict[str, Tensor] = {}
    for step in range(5):
        g = torch.Generator().manual_seed(step * 2 + echelon.rank())
        engine.step(torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g))
        for entry in low_memory.entries:
            exact = low_memory.exact_weight(entry)
            assert not torch.equal(exact, entry.parameter.float())
            by_hand[entry.name] = by_hand[entry.name].lerp(exact, 1 - DECAY) if step else exact
    assert engine.ema.averages is not None
    found = dict(engine.ema.averages.tensors())
    before = engine.whole_state()
    with engine.ema.applied():
        shown = engine.whole_state()
    torch.testing.assert_close(shown, {name: value.bfloat16() for name, value in by_hand.items()}, check_device=False)
    torch.testing.assert_close(engine.whole_state(), before, rtol=0, atol=0)
    return found, by_hand  # type: ignore[return-value]


def test_average_of_low_memory_weights_is_that_of_the_exact_ones() -> None:
    for found, by_hand in run(follow_low_memory):
        torch.testing.assert_close(found, by_hand, rtol=0, atol=0)


def follow_two() -> None:
    """Each optimizer's parameters are averaged after its own updates; frozen ones stay as they are."""
    echelon.init()
    torch.manual_seed(3)
    nets = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "still": nn.Linear(4, 4)})
    nets["still"].requires_grad_(False)
    made = {key: torch.optim.SGD(nets[key].parameters(), lr=0.1) for key in ("one", "two")}
    engine = echelon.distribute(nets, optimizer=made, strategy=Strategy(fast=False, shard=1), log=QUIET)
    engine.ema(DECAY)
    by_hand: dict[str, Tensor] = {}
    for step, key in enumerate(["one", "two", "one", "one"]):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 2 + echelon.rank())).to(echelon.device())
        engine.backward(nets["two"](nets["one"](x)).square().mean())
        engine.update(key)
        for name, value in engine.whole_state().items():
            if name.startswith(key):
                by_hand[name] = by_hand[name].lerp(value, 1 - DECAY) if name in by_hand else value
    found, now = engine.ema.whole_state(), engine.whole_state()
    expected = {name: by_hand.get(name, value) for name, value in now.items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not torch.equal(found["one.weight"], now["one.weight"])
    assert engine.ema.averages is not None
    assert engine.ema.averages.facts() == {"updates": {"one": 3, "two": 1}}


def test_average_follows_the_updates_of_each_optimizer() -> None:
    run(follow_two)


# ---- decay, types, buffers ----


def _alone(model: nn.Module, **options: Any) -> EmaWeights:
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    local_state = LocalState(model, dict(model.named_parameters()), groups=grouped_names(model, optimizers))
    return EmaWeights(Ema(**options), local_state)


def test_decay_warms_up_as_in_timm_and_diffusers() -> None:
    warm = Ema(decay=0.9, warmup=True, min_decay=0.05, after=2)
    assert [warm.decay_after(n) for n in range(3)] == [0.0, 0.0, 0.0]
    assert warm.decay_after(3) == pytest.approx(1 - 2 ** (-2 / 3))
    assert warm.decay_after(10**6) == 0.9
    assert [Ema(decay=0.9).decay_after(n) for n in range(3)] == [0.0, 0.9, 0.9]


def test_average_of_narrow_weights_does_not_stand_still() -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    averages = _alone(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(1.0)
        averages.update({"main"})
        model.weight.fill_(1.0078125)  # a thousandth of the difference is nothing in bf16
        for _ in range(1000):
            averages.update({"main"})
    found = averages.tensors()["weight"]
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch.full((2, 2), 1 + 0.0078125 * (1 - 0.999**1000)), rtol=0, atol=1e-5)
    assert averages.as_weights()["weight"].dtype == torch.bfloat16  # type: ignore[union-attr]


def test_buffers_are_averaged_where_asked_as_torch_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    ours = _alone(model, decay=DECAY, use_buffers=True)
    for _ in range(4):
        model(torch.randn(5, 3)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * (parameter.grad if parameter.grad is not None else 0.0))
        theirs.update_parameters(model)
        ours.update({"main"})
    expected = {name: value for name, value in theirs.module.state_dict().items() if value.is_floating_point()}
    torch.testing.assert_close(ours.tensors(), expected, rtol=0, atol=1e-7)


# ---- mistakes ----


def misuse(how: str) -> None:
    echelon.init()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = echelon.distribute(model, loss=F.mse_loss, optimizer=optimizer, strategy=Strategy(fast=False), log=QUIET)
    batch = torch.randn(3, 4), torch.randn(3, 2)
    if how == "none":
        engine.evaluate(batch, ema=True)
    engine.ema(**({"decy": 0.9} if how == "name" else {"decay": 1.5} if how == "value" else {}))
    if how == "twice":
        engine.ema()
    with engine.ema.applied():
        engine.save("nowhere") if how == "save" else engine.step(*batch)


MISTAKES = {
    "none": "engine.ema: there is no average; call engine.ema(decay=0.999) before training",
    "name": "engine.ema has no option 'decy'; did you mean 'decay'?",
    "value": "engine.ema(decay=1.5): expected 0 or more, and less than 1",
    "twice": "engine.ema() was called before; an engine has one average: call it once",
    "step": "engine.step(): the model holds averaged weights here; leave 'with engine.ema.applied()' first",
    "save": "engine.save(): the model holds averaged weights here; leave 'with engine.ema.applied()' first",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_misuse_of_an_average_is_one_line(how: str) -> None:
    assert errors(misuse, how, ranks=1) == [f"UsageError: {MISTAKES[how]}"]
