"""Batch norm over replicas equals batch norm in one process, in every variant torch has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import run
from torch import Tensor, nn

import echelon
from echelon.parallel.data.batch_norm import _alone, _alone_in_plain_words
from echelon.parallel.data.sync_batch_norm import synchronize

VARIANTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (5,)),
    "1d sequence": (lambda: nn.BatchNorm1d(5), (5, 4)),
    "2d": (lambda: nn.BatchNorm2d(5), (5, 3, 4)),
    "3d": (lambda: nn.BatchNorm3d(5), (5, 2, 3, 2)),
    "no affine": (lambda: nn.BatchNorm2d(5, affine=False), (5, 3, 3)),
    "cumulative average": (lambda: nn.BatchNorm2d(5, momentum=None), (5, 3, 3)),
    "no running statistics": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (5, 3, 3)),
    "double": (lambda: nn.BatchNorm2d(5).double(), (5, 3, 3)),
    "far from zero": (lambda: nn.BatchNorm2d(5), (5, 6, 6)),
}


def both(variant: str) -> list[tuple[Tensor, Tensor]]:
    """(ours on this rank's rows, torch's on all rows, cut to this rank's) for everything that comes out."""
    make, shape = VARIANTS[variant]
    world = echelon.init()
    torch.manual_seed(1)
    whole = make().to(world.device)
    for p in whole.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    ours = nn.Sequential(copy.deepcopy(whole))
    synchronize(ours, ["0"], world.control)
    dtype = torch.double if variant == "double" else torch.float
    shift = 1000.0 if variant == "far from zero" else 3.0
    rows = slice(0, 5) if world.rank == 0 else slice(5, 8)
    results = []
    for step in range(3):
        x = torch.randn(8, *shape, dtype=dtype, generator=torch.Generator().manual_seed(step)) * 2 + shift
        weight = torch.randn(8, *shape, dtype=dtype, generator=torch.Generator().manual_seed(50 + step))
        x, weight = x.to(world.device), weight.to(world.device)
        a, b = x[rows].clone().requires_grad_(), x.clone().requires_grad_()
        mine, expected = ours(a), whole(b)
        (mine * weight[rows]).sum().backward()
        (expected * weight).sum().backward()
        results += [(mine, expected[rows]), (a.grad, b.grad[rows])]
    gradients = [p.grad for p in ours.parameters()]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    results += list(zip(gradients, [p.grad for p in whole.parameters()], strict=True))
    results += list(zip(ours[0].buffers(), whole.buffers(), strict=True))
    ours.eval()
    whole.eval()
    results.append((ours(x[rows]), whole(x)[rows] if whole.running_mean is not None else ours(x[rows])))
    return [(a.detach(), b.detach()) for a, b in results]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_one_process(variant: str) -> None:
    # With a mean of 1000 and a spread of 2 single precision itself leaves about 1e-4 of the spread.
    tolerance = 1e-3 if variant == "far from zero" else 1e-5
    for results in run(both, variant, ranks=2):
        assert len(results) >= 7
        for mine, expected in results:
            torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def copied() -> bool:
    """A deep copy (an average of weights, say) is a layer of its own, and still shares its statistics."""
    world = echelon.init()
    net = nn.Sequential(nn.BatchNorm1d(2))
    synchronize(net, ["0"], world.control)
    twin = copy.deepcopy(net)
    twin(torch.full((2, 2), float(world.rank)))
    untouched = torch.equal(net[0].running_mean, torch.zeros(2))
    shared = torch.allclose(twin[0].running_mean, torch.full((2,), 0.05))
    return untouched and shared and isinstance(twin[0], nn.BatchNorm1d)


def test_a_deep_copy_is_a_layer_of_its_own() -> None:
    assert run(copied, ranks=2) == [True, True]


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 4), (4, 5, 3, 2), (2, 5, 3, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_where_a_kernel_is_missing_plain_words_say_the_same(shape: tuple[int, ...], affine: bool) -> None:
    draw = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(shape, generator=draw, dtype=torch.double) for _ in range(2))
    mean, var, weight = (torch.rand(5, generator=draw, dtype=torch.double) + 0.5 for _ in range(3))
    of = dy, x, weight if affine else None, mean, var, 1e-5
    for ours, theirs in zip(_alone_in_plain_words(*of), _alone(*of), strict=True):
        torch.testing.assert_close(ours, theirs)
