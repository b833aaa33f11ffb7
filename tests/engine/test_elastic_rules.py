"""Ranks come and go: batch, rate, data and shape of the plan follow the stated rules, measured by plain torch loops."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon
from echelon import Checkpoint, Elastic, Log, LrScaling, Strategy
from echelon.base.environment import ELASTIC
from echelon.base.errors import DataError, UsageError
from echelon.data import FileList, Loader
from echelon.engine.elastic import ElasticState, fit_to_ranks, rule_in_force, shares
from echelon.plan.axes import refit
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Pipeline, Split
from echelon.strategy.annotations.slices import Slices


def data(samples: int = 98) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(samples, 6, generator=g), torch.randint(3, (samples,), generator=g))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def go_on(directory: str, until: int, batch_size: int, staged: bool, **options: Any) -> tuple[dict[str, Tensor], str]:
    """Train on from the newest checkpoint, to step ``until``: the weights, and what the console said."""
    echelon.init(seed=4)
    net = network()
    if staged:
        echelon.annotate(net, {"0": echelon.stage(0), "2": echelon.stage(1), "": echelon.pipeline(micro_batches=2)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    said = Path(directory, f"said-{until}-{echelon.rank()}")
    with said.open("w") as file, contextlib.redirect_stdout(file):
        engine = echelon.distribute(
            net,
            loss=F.cross_entropy,
            optimizer=optimizer,
            scheduler=schedule(optimizer),
            checkpoint=Checkpoint(dir=directory),
            log=Log(every=10_000),
            **options,
        )
        loader = engine.loader(data(), batch_size=batch_size)
        for _ in loader.epochs(100):
            for x, y in loader:
                engine.step(x, y)
                if engine.steps == until:
                    engine.save(wait=True)
                    file.flush()
                    return engine.whole_state(), said.read_text()
    raise AssertionError("unreachable")


def plainly(batches: Callable[[], Any], steps: int, factor: Callable[[int], float]) -> dict[str, Tensor]:
    """One process, a loop of one's own. ``factor`` of a step (from 0) is what its rate is multiplied by."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = schedule(optimizer)
    made = batches()
    for step in range(steps):
        x, y = next(made)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        given = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = given * factor(step)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = given
        scheduler.step()
    return dict(net.state_dict())


def alike(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("staged", "batch_size"), [(False, 8), (True, 16)], ids=["replicas", "stages"])
def test_a_batch_that_is_kept_gives_the_numbers_of_one_process(tmp_path: Path, staged: bool, batch_size: int) -> None:
    options: dict[str, Any] = {"elastic": Elastic()}
    if not staged:
        options["strategy"] = Strategy(lr_scaling=LrScaling(warmup_steps=0))
    lines = ""
    for ranks, until in ((4, 3), (3, 6), (2, 9)):  # of 4 steps an epoch; the last has 2 samples, and is padded
        results = run(go_on, str(tmp_path), until, batch_size, staged, ranks=ranks, **options)
        lines = lines + results[0][1]
    first = 2 if staged else 4

    def batches() -> Any:
        loader = Loader(data(), batch_size=32, seed=4, multiple=first)
        return ((x, y) for _ in loader.epochs(3) for x, y in loader)

    wanted = plainly(batches, 9, lambda step: 1.0 if staged else 4.0)
    for weights, _ in results:
        alike(weights, wanted)
    assert f"3 replicas now, {first} when training began: global batch stays 32 (11 + 11 + 10)" in lines
    assert ("3 ranks do not fit 2 stages; continuing with one whole model a rank x 3 replicas" in lines) == staged


@pytest.mark.parametrize(("rate", "factor"), [("linear", 1.5), ("sqrt", 1.5**0.5)])
def test_a_batch_that_scales_changes_the_rate_by_the_rule(tmp_path: Path, rate: Any, factor: float) -> None:
    options: dict[str, Any] = {"elastic": Elastic(batch="scale", rate=rate)}
    run(go_on, str(tmp_path), 3, 4, False, ranks=2, **options)
    results = run(go_on, str(tmp_path), 6, 4, False, ranks=3, **options)

    def batches() -> Any:
        small, large = (Loader(data(), batch_size=size, seed=4) for size in (8, 12))
        pieces = iter(small)
        yield from (next(pieces) for _ in range(3))
        large.load_state_dict(small.state_dict())
        yield from large

    wanted = plainly(batches, 6, lambda step: 1.0 if step < 3 else factor)
    for weights, _ in results:
        alike(weights, wanted)
    assert (
        "echelon: 3 replicas now, 2 when training began: global batch is now 12 (4 for each), "
        f"learning rate x {factor:.4g} ({rate})\n"
    ) in results[0][1]


def seen(state: dict[str, Any] | None, ranks: int, steps: int, size: int = 203) -> tuple[list[int], dict[str, Any]]:
    """Return the samples that ``ranks`` ranks see in so many steps of a global batch of 30, from ``state`` on."""
    numbers: list[int] = []
    for rank in range(ranks):
        held: list[int] = []
        loader = Loader(
            (torch.arange(size),), batch_size=30, total=30, rank=rank, world_size=ranks, seed=7, on_share=held.append
        )
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(steps):
            (rows,) = next(batches)
            numbers += rows[: held[-1]].tolist()
    return numbers, loader.state_dict()


def test_epoch_over_4_2_3_ranks_loses_or_repeats_no_sample() -> None:
    """An epoch read by 4, then 2, then 3 ranks loses no sample and repeats none."""
    first, state = seen(None, 4, 2)
    second, state = seen(state, 2, 3)
    third, state = seen(state, 3, 1)
    full = [*first, *second, *third]
    assert len(full) == len(set(full)) == 180
    rest, _ = seen(state, 3, 1)  # the ragged end: 23 samples, padded to 24
    assert {*full, *rest} == set(range(203))
    assert len(rest) == 24
    alone, _ = seen(None, 1, 6)
    assert sorted(alone) == sorted(full)


def test_batch_smaller_than_ranks_gives_some_a_stand_in() -> None:
    """With a batch smaller than the number of ranks, some ranks get a stand-in batch."""
    held: list[int] = []
    for rank in range(4):
        loader = Loader((torch.arange(9),), batch_size=1, total=3, rank=rank, world_size=4, on_share=held.append)
        assert [len(rows) for (rows,) in loader] == [1, 1, 1]
    assert held == [1] * 9 + [0] * 3


def test_per_rank_files_restart_epoch_or_refuse_without_rule(tmp_path: Path) -> None:
    """If ranks read their own files, a resize restarts the epoch with a notice; without the rule it is refused."""
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("\n".join(str(10 * number + i) for i in range(10)))

    def lines_of(path: Any) -> Any:
        return (int(line) for line in Path(path).read_text().splitlines())

    files = FileList(str(tmp_path / "*.txt"), lines_of)
    before = Loader(files, batch_size=4, seed=1)
    next(iter(before))
    said: list[str] = []
    group: Any = object()  # never asked: nothing is read
    Loader(files, batch_size=2, world_size=2, group=group, on_change=said.append).load_state_dict(before.state_dict())
    assert said == ["epoch 0 was started by 1 ranks that read their own files, and there are 2 now: it starts again"]
    with pytest.raises(DataError, match="use world_size=1 until that epoch is done"):
        Loader(files, batch_size=2, world_size=2, group=group, seed=1).load_state_dict(before.state_dict())


PLAIN, WOVEN = Pipeline(), Pipeline(schedule="interleaved")


@pytest.mark.parametrize(
    ("asked", "stage", "split"),
    [
        ((2, PLAIN, False, None, 3), 1, 1),  # three whole models
        ((3, PLAIN, False, None, 4), 2, 1),  # two stages, twice
        ((4, PLAIN, False, None, 6), 3, 1),
        ((4, PLAIN, False, None, 2), 2, 1),
        ((1, None, True, 4, 6), 1, 2),  # a smaller split, three times
        ((1, None, True, 4, 2), 1, 2),
        ((2, PLAIN, True, 4, 3), 1, 1),
        ((2, PLAIN, True, 4, 6), 1, 2),  # the split is kept, the stages are not
        ((4, PLAIN, True, 8, 12), 3, 2),
        ((4, PLAIN, True, None, 6), 3, 2),  # the size of the split was not given
        ((2, PLAIN, True, None, 3), 1, 3),
        ((4, WOVEN, False, None, 3), 1, 1),
        ((8, WOVEN, False, None, 6), 2, 1),  # 8 stages, four of them on a rank
    ],
)
def test_the_nearest_shape(asked: tuple[int, Any, bool, int | None, int], stage: int, split: int) -> None:
    found = refit(*asked)
    assert found is not None
    assert (found.stage, found.split) == (stage, split)
    assert asked[4] % (stage * split) == 0  # every rank has a part


def test_what_fits_is_left_alone_and_mistakes_stay_mistakes() -> None:
    assert refit(2, PLAIN, False, None, 4) is None
    assert refit(1, None, False, None, 3) is None
    assert refit(4, PLAIN, True, 8, 1) is None
    with pytest.raises(UsageError, match="a slice of 2 ranks was asked for, but the marks fill only 1"):
        refit(1, None, False, 2, 4)


def test_merged_stages_are_neighbours_and_keep_their_marks() -> None:
    units = {f"layers.{number}": number for number in range(4)}
    pipeline = Pipeline(micro_batches=8, weights=(1.0, 1.0, 1.0, 2.0))
    marks = ModelMarks(units=units, splits={"head": Split()}, replicates=(), pipeline=pipeline, default=None)
    merged, slices, line = fit_to_ranks(Elastic(), marks, Slices(average=8), 4, 4)
    assert merged.units == {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
    assert (merged.pipeline, merged.splits) == (Pipeline(micro_batches=8), marks.splits)
    assert slices == Slices(average=4)
    assert line == "4 ranks do not fit 4 stages x split over 2; continuing with 2 stages x split over 2"
    listed, split = Slices(specific=((0, 2), (1, 3))), dataclasses.replace(marks, units={}, pipeline=None)
    assert fit_to_ranks(Elastic(), split, listed, 6, 2)[1] == Slices(average=2)
    assert fit_to_ranks(None, marks, listed, 6, 2) == (marks, listed, None)


def test_elastic_rule_in_force_with_elastic_hosts_or_if_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The elastic rule is in force where the number of hosts may change or where it was given."""
    monkeypatch.delenv(ELASTIC, raising=False)
    assert rule_in_force(None, by_servers=False) is None
    assert rule_in_force(Elastic(batch="scale"), by_servers=False) == Elastic(batch="scale")
    monkeypatch.setenv(ELASTIC, "2:8")
    assert rule_in_force(None, by_servers=False) == Elastic()
    assert rule_in_force(None, by_servers=True) is None
    with pytest.raises(UsageError, match="come and go without it"):
        rule_in_force(Elastic(), by_servers=True)
    with pytest.raises(UsageError, match="needs no other rate"):
        Elastic(rate="linear")
    assert [Elastic(batch="scale", rate=rate).factor(4.0) for rate in (None, "sqrt", "none")] == [4.0, 2.0, 1.0]
    assert Elastic().factor(4.0) == 1.0


def test_elastic_state_start_survives_resize_else_starts_now() -> None:
    """The sizes at the start of the run survive resizes, and a state without them starts with the current ones."""
    began = ElasticState(Elastic(), 4)
    began.replicas = 4
    began.made(32)
    later = ElasticState(Elastic(), 3)
    later.restore(began.facts())
    later.replicas = 3
    assert later.sizes(8, None) == (None, 32)
    assert later.made(32) is not None
    assert later.sizes(5, None) == (5, None)  # a second loader is new
    later.made(15)
    assert later.facts() == {"ranks": 4, "replicas": 4, "batches": [32, 15]}
    old = ElasticState(Elastic(), 3)
    old.restore(None)
    assert (old.sizes(8, None), old.factor) == ((8, None), 1.0)
    not_in_force = ElasticState(None, 3)
    not_in_force.restore(began.facts())
    assert not_in_force.sizes(8, None) == (8, None)


def test_shares_in_words() -> None:
    assert [shares(32, 4), shares(32, 3), shares(100, 7)] == ["8 for each", "11 + 11 + 10", "2 x 15 + 5 x 14"]
