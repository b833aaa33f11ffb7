"""Losses and choices over split classes equal those over whole ones, and the logits are never gathered."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from harness import run
from test_split import axis_of, own_rows, randn, rows_of
from torch import Tensor, nn

import echelon
from echelon.base.errors import DataError
from echelon.parallel.evaluate import accuracy, top5
from echelon.parallel.tensor import ShardedActivation, apply_split
from echelon.strategy.annotations.marks import Split

CLASSES = 11
SHAPES: dict[str, tuple[int, ...]] = {"one": (), "batch": (9,), "tokens": (9, 4), "image": (9, 2, 3)}


def all_rows(x: Tensor) -> list[slice]:
    size = echelon.init().size
    return [rows_of(rank, size, x) for rank in range(size)]


def spread_logits(
    logits: Tensor, dim: int, mode: str, classes: tuple[float, ...] | None = None
) -> tuple[ShardedActivation, Tensor]:
    """The logits as a split layer would hand them on, and this rank's part of them as a leaf."""
    world = echelon.init()
    axis = axis_of(world, mode == "spread")
    sizes = axis.sizes(logits.shape[dim], classes)
    local = logits.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone().requires_grad_()
    rows = None
    if mode == "spread":
        rows = tuple(cut.stop - cut.start for cut in all_rows(logits))
    return ShardedActivation(local, dim, sizes, axis, rows), local


def compare_loss(shape: str, mode: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    world = echelon.init()
    dim = 1 if SHAPES[shape] else 0
    full = [*SHAPES[shape]]
    full.insert(dim, CLASSES)
    whole = (randn(*full) * 3).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, SHAPES[shape], generator=torch.Generator().manual_seed(4))
    if target.dim() and "ignore_index" in options:
        target[1] = options["ignore_index"]
    logits, local = spread_logits(whole.detach(), dim, mode)
    mine = own_rows(world, target) if mode == "spread" else slice(None) if target.dim() else ...
    with Collectives() as forward:
        loss = F.cross_entropy(logits, target[mine], **options)
    assert not logits.has_whole
    expected = F.cross_entropy(whole[mine], target[mine], **options)
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **tolerance)
    with Collectives() as backward:
        (loss * torch.linspace(0.5, 1, loss.numel()).view(loss.shape)).sum().backward()
    for rows in all_rows(target) if mode == "spread" else [mine]:
        again = F.cross_entropy(whole[rows], target[rows], **options)
        (again * torch.linspace(0.5, 1, again.numel()).view(again.shape)).sum().backward()
    begin = sum(logits.sizes[: world.rank])
    torch.testing.assert_close(local.grad, whole.grad.narrow(dim, begin, local.shape[dim]), **tolerance)
    alone = world.size == 1
    assert forward.count == ({} if alone else {"all_gather": 1 if mode == "shared" else 2})
    assert backward.count == ({} if alone or mode == "shared" else {"all_gather": 1})


def all_losses(mode: str) -> int:
    weight = torch.linspace(0.5, 2, CLASSES)
    done = 0
    for shape, reduction, smoothing, weighted, ignore in itertools.product(
        SHAPES if mode == "shared" else ["batch", "tokens"],
        ["mean", "sum", "none"],
        [0.0, 0.1],
        [False, True],
        [None, 2],
    ):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        options |= {"weight": weight} if weighted else {}
        options |= {"ignore_index": ignore} if ignore is not None else {}
        compare_loss(shape, mode, options, torch.float32)
        done += 1
    compare_loss("batch", mode, {}, torch.bfloat16)
    compare_loss("batch", mode, {}, torch.float64)
    return done


def test_extreme_logits() -> None:
    run(extremes, ranks=2)


def extremes() -> None:
    """Masked classes, rows of which all is masked on one rank, large logits, probabilities, a rank without classes."""
    logits = randn(6, CLASSES) * 200
    logits[0, 6:] = -torch.inf
    logits[1, :6] = -torch.inf
    target = torch.tensor([1, 8, 3, 4, 10, 0])
    spread, _ = spread_logits(logits, 1, "shared")
    torch.testing.assert_close(F.cross_entropy(spread, target), F.cross_entropy(logits, target))
    soft = torch.softmax(randn(6, CLASSES, seed=1), 1)
    finite, _ = spread_logits(randn(6, CLASSES), 1, "shared")
    torch.testing.assert_close(F.cross_entropy(finite, soft), F.cross_entropy(randn(6, CLASSES), soft))
    lopsided, _ = spread_logits(randn(6, 3), 1, "shared", (1.0, 30.0))
    assert 0 in lopsided.sizes
    torch.testing.assert_close(
        F.cross_entropy(lopsided, target % 3, label_smoothing=0.2),
        F.cross_entropy(randn(6, 3), target % 3, label_smoothing=0.2),
    )
    assert torch.equal(lopsided.argmax(1), randn(6, 3).argmax(1))
    with pytest.raises(DataError, match="target 11 is not one of the 11 classes"):
        F.cross_entropy(finite, target + 1)


def choices(mode: str) -> None:
    world = echelon.init()
    with torch.no_grad():
        for shape, dim in (((9, CLASSES), 1), ((9, CLASSES, 3), 1), ((9, 4, CLASSES), 2)):
            logits = randn(*shape).mul(2).round()  # many are equal
            spread, _ = spread_logits(logits, dim, mode)
            mine = logits[own_rows(world, logits)] if mode == "spread" else logits
            with Collectives() as sent:
                found = spread.argmax(dim)
            assert sent.count == ({"all_gather": 1} if world.size > 1 else {})
            assert torch.equal(found, mine.argmax(dim))
            assert torch.equal(torch.argmax(spread, dim=dim, keepdim=True), mine.argmax(dim, keepdim=True))
            assert torch.equal(spread.max(dim).values, mine.max(dim).values)
            assert torch.equal(spread.max(dim)[1], mine.argmax(dim))
            for k in (1, 3, 8):
                values, indices = spread.topk(k, dim=dim)
                assert torch.equal(values, mine.topk(k, dim=dim).values)
                assert torch.equal(mine.gather(dim, indices), values)
                assert indices.sort(dim).values.diff(dim=dim).min() > 0 if k > 1 else True
            assert not spread.has_whole


def losses_and_choices() -> int:
    done = 0
    for mode in ("shared", "spread"):
        done += all_losses(mode)
        choices(mode)
    return done


@pytest.mark.parametrize("ranks", [1, 3])
def test_losses_and_choices_equal_those_of_the_whole(ranks: int) -> None:
    assert run(losses_and_choices, ranks=ranks) == [144] * ranks


def train_both() -> list[Any]:
    return train("shared") + train("spread")


def train(mode: str) -> list[Any]:
    """A classifier with a split head, trained beside a plain one, with metrics."""
    world = echelon.init()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 23))
    ours = copy.deepcopy(plain)
    applied = apply_split(ours, {"2": Split()}, axis_of(world, mode == "spread"))
    steps = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in (plain, ours)]
    losses = []
    for step in range(6):
        x, y = randn(10, 6, seed=step), torch.randint(23, (10,), generator=torch.Generator().manual_seed(step))
        rows = own_rows(world, x) if mode == "spread" else slice(None)
        share = len(x[rows]) / 10
        expected, loss = F.cross_entropy(plain(x), y), F.cross_entropy(ours(x[rows]), y[rows]) * share
        for optimizer, value in zip(steps, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
        total = loss.detach().clone()
        if mode == "spread":
            torch.distributed.all_reduce(total)
            for name, p in ours.named_parameters():
                if name not in applied.layouts:
                    torch.distributed.all_reduce(p.grad)
        for optimizer in steps:
            optimizer.step()
        losses.append((float(total), float(expected)))
    with torch.no_grad(), Collectives() as sent:
        output = ours(x[rows])
        before = sent.count.total()
        metrics = [(metric(output, y[rows]), metric(plain(x), y)[rows]) for metric in (accuracy, top5)]
        assert sent.count.total() - before == 2  # one message for each of them
        assert not output.has_whole
    for got, want in metrics:
        assert torch.equal(got, want)
    for name, p in plain.named_parameters():
        part = applied.layouts[name].take(p.data) if name in applied.layouts else p.data
        torch.testing.assert_close(dict(ours.named_parameters())[name].data, part, rtol=1e-5, atol=1e-5)
    return losses


def test_a_split_classification_head_trains_as_a_plain_one() -> None:
    for losses in run(train_both, ranks=2):
        assert len(losses) == 12
        for got, want in losses:
            assert got == pytest.approx(want, abs=1e-5)


def language_model() -> None:
    """Positions shifted, logits flattened, as language models do it."""
    world = echelon.init()
    for mode in ("shared", "spread"):
        axis = axis_of(world, mode == "spread")
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
        ours = copy.deepcopy(plain)
        apply_split(ours, {"0": Split(), "1": Split()}, axis)
        ids = torch.randint(13, (7, 6), generator=torch.Generator().manual_seed(1))
        mine = ids[own_rows(world, ids)] if mode == "spread" else ids
        for reshape in (lambda x: x.reshape(-1, 13), lambda x: x.flatten(0, 1), lambda x: x.view(-1, x.size(-1))):
            logits = reshape(ours(mine)[:, :-1])
            assert isinstance(logits, ShardedActivation)
            loss = F.cross_entropy(logits, mine[:, 1:].flatten())
            assert not logits.has_whole
            expected = F.cross_entropy(plain(mine)[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
            torch.testing.assert_close(loss, expected)
        channels = ours(mine).transpose(1, 2)
        torch.testing.assert_close(F.cross_entropy(channels, mine), F.cross_entropy(plain(mine).transpose(1, 2), mine))
        assert not channels.has_whole


def test_language_model_losses_never_gather() -> None:
    run(language_model, ranks=2)
