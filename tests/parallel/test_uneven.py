"""Uneven by design: batch shares, widths of shards and depths of stages for devices of different speed, all exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import errors, run
from matrix import Transformer
from zoo import QUIET, token_loss

import echelon
from echelon import pipeline, split
from echelon.data.order import weighted

WIDE = (3.0, 1.0)


def train(marks: dict[str, Any], shares: tuple[float, ...] = ()) -> dict[str, Any]:
    echelon.init()
    torch.manual_seed(3)
    model = echelon.annotate(Transformer(vocab=21), marks)
    engine = echelon.distribute(
        model, loss=token_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), log=QUIET
    )
    g = torch.Generator().manual_seed(5)
    data = tuple(torch.randint(21, (40, 6), generator=g) for _ in range(2))
    options = {"shares": shares} if shares and echelon.world_size() > 1 else {}
    sizes, losses = [], []
    for batch in engine.loader(data, global_batch=8, **options):
        sizes.append(len(batch[0]))
        losses.append(float(engine.step(*batch)))
    held = sum(p.numel() for p in engine._parts.local_state.parameters.values())  # type: ignore[union-attr]
    depth = list(engine.plan.stages.units.values()) if engine.plan.stages else []
    result = {"losses": losses, "sizes": sizes, "held": held, "depth": depth, "weights": engine.whole_state()}
    engine.close()
    return result


def check(marks: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    one = run(train, marks, ranks=1, **options)[0]
    many = run(train, marks, ranks=2, **options)
    for mine in many:
        torch.testing.assert_close(torch.tensor(mine["losses"]), torch.tensor(one["losses"]), rtol=1e-5, atol=1e-5)
        for name, expected in one["weights"].items():
            torch.testing.assert_close(mine["weights"][name], expected, rtol=1e-5, atol=1e-5)
    return many


def test_replicas_with_different_shares_of_the_batch() -> None:
    many = check({}, shares=WIDE)
    assert [mine["sizes"] for mine in many] == [[6] * 5, [2] * 5]


COUNTS = ((1, 1), (10_000_001, 3), (7, 16_777_217), (4096, 4095.5), (0, 4097))


def counted() -> list[tuple[float, float]]:
    """Losses of 1 and 4 on the two ranks, each counting for what COUNTS say; and how many samples were counted."""
    echelon.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine = echelon.distribute(
        model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), log=QUIET
    )
    x = torch.full((2, 1), 1.0 + echelon.rank())
    found = []
    for counts in COUNTS:
        loss = engine.step(x, torch.zeros(2, 1), samples=counts[echelon.rank()])
        found.append((float(loss), float(engine._parts.gradients.assumed)))
    return found


def test_samples_by_the_million_are_counted_exactly() -> None:
    """They travel among single precision's numbers."""
    for found in run(counted, ranks=2):
        for (first, second), (loss, samples) in zip(COUNTS, found, strict=True):
            assert samples == first + second
            assert loss == pytest.approx((first + 4 * second) / (first + second), rel=1e-6)


SHARES = (slice(0, 5), slice(5, 12))  # of 12 samples, on two ranks


def own_loop(told: str) -> list[Any]:
    """Losses and weights of a loop of its own with batch norm; ``told``: where the number of samples is."""
    echelon.init()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    engine = echelon.distribute(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), log=QUIET)
    g = torch.Generator().manual_seed(5)
    x, y = (torch.randn(12, width, generator=g).to(echelon.device()) for width in (4, 1))
    if echelon.world_size() > 1:
        x, y = (part[SHARES[echelon.rank()]] for part in (x, y))
    for _ in range(4):
        engine.backward((model(x) - y).square().mean(), **({"samples": len(x)} if "backward" in told else {}))
        engine.backward(model(x).abs().mean(), **({"samples": len(x)} if told.startswith("backward") else {}))
        engine.update(**({"samples": len(x) + told.count("!")} if "update" in told else {}))
    return [engine.whole_state()]


def test_own_loop_batch_norm_with_batches_of_different_lengths() -> None:
    """A custom training loop with batch norm over batches of different lengths equals one process."""
    [one] = run(own_loop, "backward", ranks=1)[0]
    for told in ("backward", "backward and update"):
        for [mine] in run(own_loop, told, ranks=2):
            for name, expected in one.items():
                torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6)


def test_samples_that_are_told_too_late_or_twice_are_refused() -> None:
    assert "give engine.backward(loss, samples=...)" in errors(own_loop, "update", ranks=2)[0]
    assert "update() was given samples=6, but backward() samples=5" in errors(own_loop, "backward, update!", ranks=2)[0]
    assert "samples=5 and then samples=None for one update" in errors(own_loop, "first backward", ranks=2)[0]


def test_split_shards_of_different_widths() -> None:
    wide = split(weights=WIDE)
    many = check({"embed": wide, "head": wide, "blocks.*": wide})
    assert many[0]["held"] > 2 * many[1]["held"]


def test_pipeline_stage_depths_follow_device_speed() -> None:
    """Stages get different depths according to the speed of their devices."""
    many = check({"": pipeline(micro_batches=4, stages=2, weights=WIDE)})
    depth = many[0]["depth"]
    assert depth.count(0) > depth.count(1) > 0


def test_shares_of_a_batch_cover_it_once_and_leave_no_rank_out() -> None:
    for count in range(2, 40):
        for weights in ((3, 1), (1, 1, 1), (100, 1, 1), (1, 5, 2, 2)):
            cuts = [weighted(count, rank, weights) for rank in range(len(weights))]
            assert [i for cut in cuts for i in range(count)[cut]] == list(range(count))
            assert count < len(weights) or all(range(count)[cut] for cut in cuts)


def test_shares_that_do_not_fit_the_replicas_are_refused() -> None:
    line = errors(train, {}, ranks=2, shares=(1.0, 2.0, 3.0))[0]
    assert "shares=(1.0, 2.0, 3.0): one number above 0 for each of the 2 replicas" in line
