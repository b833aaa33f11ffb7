"""The law: two and four ranks give the losses, gradients and weights that one process gives on the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor
from zoo import QUIET, batch_for, build

import echelon
from echelon import Reduction, Strategy


@dataclass
class Trained:
    losses: list[float]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]


def train(
    model: str,
    strategy: Strategy | None = None,
    steps: int = 10,
    samples: int = 8,
    shares: list[int] | None = None,
    optimizer: str = "sgd",
) -> Trained:
    """Ten steps on this rank's part of each global batch (``shares``: how many samples each rank takes)."""
    echelon.init()
    net, loss = build(model)
    made = _optimizer(optimizer, net)
    engine = echelon.distribute(net, loss=loss, optimizer=made, strategy=strategy, log=QUIET)
    losses = []
    for step in range(steps):
        losses.append(float(engine.step(*_mine(batch_for(model, samples, step), shares))))
    gradients = {
        name: None if p.grad is None else (p.grad.to_dense() if p.grad.is_sparse else p.grad.clone())
        for name, p in net.named_parameters()
    }
    return Trained(losses, gradients, {name: value.clone() for name, value in net.state_dict().items()})


def _optimizer(kind: str, net: torch.nn.Module) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    momentum = 0.0 if kind == "plain" else 0.9
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)


def _mine(batch: tuple[Tensor, ...], shares: list[int] | None) -> list[Tensor]:
    world = echelon.world_size()
    shares = shares if shares and world > 1 else [len(batch[0]) // world] * world
    begin = sum(shares[: echelon.rank()])
    return [part[begin : begin + shares[echelon.rank()]] for part in batch]


def assert_equal(many: list[Trained], one: Trained, tolerance: float = 1e-5) -> None:
    for rank, trained in enumerate(many):
        torch.testing.assert_close(
            torch.tensor(trained.losses), torch.tensor(one.losses), rtol=tolerance, atol=tolerance,
            msg=lambda m, rank=rank: f"losses of rank {rank}: {m}",
        )  # fmt: skip
        for kind in ("gradients", "weights"):
            mine, theirs = getattr(trained, kind), getattr(one, kind)
            assert mine.keys() == theirs.keys()
            for name, expected in theirs.items():
                if expected is None:
                    assert mine[name] is None, f"rank {rank}: {name} has a gradient, one process has none"
                else:
                    torch.testing.assert_close(
                        mine[name], expected, rtol=tolerance, atol=tolerance,
                        msg=lambda m, rank=rank, kind=kind, name=name: f"{kind} of {name}, rank {rank}: {m}",
                    )  # fmt: skip


def check(model: str, ranks: int, strategy: Strategy | None = None, **options: Any) -> None:
    one = run(train, model, strategy, ranks=1, **options)[0]
    many = run(train, model, strategy, ranks=ranks, **options)
    assert_equal(many, one)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["convnet", "transformer", "partial"])
def test_replicas_equal_one_process(model: str, ranks: int) -> None:
    check(model, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sparse_gradients_equal_one_process(ranks: int) -> None:
    check("sparse", ranks, optimizer="plain")


def test_weight_decay_leaves_unused_parameters_alone() -> None:
    check("partial", 2, optimizer="adamw")


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_uneven_shares_give_the_exact_global_mean(model: str) -> None:
    check(model, 3, samples=10, shares=[5, 3, 2])  # with 8, one rounding of a weight moves the transformer over a kink


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_a_global_batch_that_changes_from_step_to_step(model: str) -> None:
    one = run(train_changing, model, ranks=1)[0]
    assert_equal(run(train_changing, model, ranks=3), one)


def train_changing(model: str) -> Trained:
    """Global batches of 9, 9, 4, 9, 5 and 6 samples, dealt out unevenly."""
    echelon.init()
    net, loss = build(model)
    engine = echelon.distribute(net, loss=loss, optimizer=_optimizer("sgd", net), log=QUIET)
    losses = []
    for step, samples in enumerate((9, 9, 4, 9, 5, 6)):
        shares = [samples - 3, 2, 1]
        losses.append(float(engine.step(*_mine(batch_for(model, samples, step), shares))))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    return Trained(losses, grads, {name: value.clone() for name, value in net.state_dict().items()})


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_a_rank_without_samples_counts_for_nothing(model: str) -> None:
    one = run(train, model, ranks=1)[0]
    many = run(train_with_stand_in, model, ranks=2)
    assert_equal(many, one)


def train_with_stand_in(model: str) -> Trained:
    """Rank 0 takes the whole global batch; rank 1 only repeats something, at weight 0."""
    echelon.init()
    net, loss = build(model)
    engine = echelon.distribute(net, loss=loss, optimizer=_optimizer("sgd", net), log=QUIET)
    losses = []
    for step in range(10):
        batch = batch_for(model, 8, step if echelon.rank() == 0 else 77)
        losses.append(float(engine.step(*batch, samples=8 if echelon.rank() == 0 else 0)))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    return Trained(losses, grads, {name: value.clone() for name, value in net.state_dict().items()})


@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_gradient_merge_equals_one_process_merging(model: str) -> None:
    check(model, 2, Strategy(gradient_merge=2))


def test_gradient_merge_equals_a_larger_batch() -> None:
    """Two merged steps of 4 samples are one step of 8 (no batch norm: its statistics see one step at a time)."""
    large = run(train, "transformer", ranks=1, steps=5, samples=8)[0]
    merged = run(train_merged, ranks=2)
    for trained in merged:
        for name, expected in large.weights.items():
            torch.testing.assert_close(trained.weights[name], expected, rtol=1e-5, atol=1e-5)


def train_merged() -> Trained:
    echelon.init()
    net, loss = build("transformer")
    engine = echelon.distribute(
        net, loss=loss, optimizer=_optimizer("sgd", net), strategy=Strategy(gradient_merge=2), log=QUIET
    )
    for step in range(5):
        batch = batch_for("transformer", 8, step)
        for half in range(2):
            rows = slice(half * 4 + echelon.rank() * 2, half * 4 + echelon.rank() * 2 + 2)
            engine.step(*(part[rows] for part in batch))
    assert engine.steps == 5
    return Trained([], {}, {name: value.clone() for name, value in net.state_dict().items()})


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(reduction=Reduction(bucket_mb=0.0005, first_bucket_mb=0.0001)),
        Strategy(reduction=Reduction(bucket_mb=0.0005, communicators=3)),
        Strategy(clip=0.1),
        Strategy(clip=0.1, gradient_merge=2),
    ],
    ids=["many buckets", "three communicators", "clip", "clip and merge"],
)
def test_options_that_change_nothing_but_speed(strategy: Strategy) -> None:
    check("transformer", 2, strategy)


def test_clip_covers_sparse_gradients() -> None:
    check("sparse", 2, Strategy(clip=0.05), optimizer="plain")


def test_bf16_autocast_equals_one_process_closely() -> None:
    """bf16 rounds in another order on another batch split: the model agrees to bf16's precision, 2**-8, in norm."""
    one = run(train, "transformer", Strategy(amp="bf16"), ranks=1, steps=3)[0]
    expected = torch.cat([value.flatten() for value in one.weights.values()])
    for trained in run(train, "transformer", Strategy(amp="bf16"), ranks=2, steps=3):
        assert trained.losses == pytest.approx(one.losses, rel=2**-8)
        found = torch.cat([value.flatten() for value in trained.weights.values()])
        assert (found - expected).norm() <= 2**-8 * expected.norm()
