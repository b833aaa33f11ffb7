"""Hybrid parallelism as a user meets it: scopes in a constructor, defaults, evaluation, placement, offload."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Log, Shard, Strategy


class Marked(nn.Module):
    """Marks where the parts are made: two stages, the second with a split head."""

    def __init__(self) -> None:
        super().__init__()
        with echelon.pipeline(micro_batches=2):
            with echelon.stage():
                self.lower = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
            with echelon.stage():
                self.upper = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
                with echelon.split():
                    self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.upper(self.lower(x)))


def data(rows: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, generator=g), torch.randint(7, (rows,), generator=g)


def build(kind: str) -> nn.Module:
    torch.manual_seed(4)
    if kind == "marked":
        return Marked()
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 7))


def train(kind: str, strategy: Strategy | None = None, default: Any = None) -> dict[str, Any]:
    echelon.init()
    model = build(kind)
    echelon.set_default(default)
    try:
        engine = echelon.distribute(
            model,
            loss=F.cross_entropy,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
            strategy=strategy,
            log=QUIET,
        )
    finally:
        echelon.set_default(None)
    for batch in engine.loader(data(), global_batch=8, shuffle=False):
        engine.step(*batch)
    judged = engine.evaluate(torch.utils.data.TensorDataset(*data(21)), batch_size=4, metrics=["accuracy", "top5"])
    return {"judged": judged, "weights": engine.whole_state(), "splits": sorted(engine.plan.splits)}


def check(kind: str, ranks: int, **options: Any) -> list[dict[str, Any]]:
    one = run(train, kind, ranks=1)[0]
    many = run(train, kind, ranks=ranks, **options)
    for mine in many:
        assert mine["judged"] == pytest.approx(one["judged"], abs=1e-5)
        for name, expected in one["weights"].items():
            torch.testing.assert_close(mine["weights"][name], expected, rtol=1e-5, atol=1e-5)
    return many


def test_scopes_in_a_constructor_and_evaluation_on_all_stages() -> None:
    check("marked", 4)


def test_what_is_unmarked_may_count_as_split() -> None:
    many = check("plain", 2, default=echelon.split())
    assert many[0]["splits"] == ["0", "2", "4"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("level", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "parameters")])
def test_offload_changes_no_number(ranks: int, level: Any, offload: Any) -> None:
    check("plain", ranks, strategy=Strategy(shard=Shard(level=level, offload=offload)))


def placed() -> str:
    """Capture a rank's output in the rank itself: the stdout that a forked rank inherits depends on the test before."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu")
        model = Marked()
        echelon.distribute(
            model,
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            sample=data(4),
            log=Log(placement=True, progress=False),
        )
    return said.getvalue()


def test_the_map_of_modules_to_devices_is_printed() -> None:
    rows = [line.split()[1:] for line in run(placed, ranks=4)[0].splitlines()]
    assert ["lower", "0", "1", "0:0", "0:1", "stage", "0"] in rows
    assert ["head", "2", "3", "0:2", "0:3", "stage", "1,", "split", "auto", "over", "2"] in rows
