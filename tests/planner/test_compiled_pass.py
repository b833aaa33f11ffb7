"""Costs of compiled code: kernels that are joined, and the tensors that forward keeps for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.planner.profiling.compiled_pass import fuse
from echelon.planner.profiling.kernel_costs import KernelLaunch
from echelon.planner.profiling.profile import Profile, profile

ROWS, WIDTH = 64, 32
ENTRIES = ROWS * WIDTH


class Chain(nn.Module):
    """A product, functions of its result, and another product."""

    def __init__(self, functions: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.functions):
            x = torch.sin(x)
        return self.last(x)  # type: ignore[no-any-return]


def profiled(model: nn.Module, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Profile:
    with torch.device("meta"):
        model = model.to("meta")
        batch = (torch.randn(shape), torch.randn(shape))
    return profile(model, batch, loss=F.mse_loss, device="cuda")


def kinds(found: Profile, compiled: bool, back: bool = False) -> dict[str, int]:
    counts: dict[str, int] = {}
    for unit in found.sheet(ROWS, compiled=compiled).units:
        for kernel in (unit.backward if back else unit.forward).kernels:
            counts[kernel.kind] = counts.get(kernel.kind, 0) + kernel.count
    return counts


@pytest.mark.parametrize("functions", [1, 4])
def test_elementwise_functions_between_products_are_one_kernel(functions: int) -> None:
    found = profiled(Chain(functions))
    assert kinds(found, compiled=False)["product"] == kinds(found, compiled=True)["product"] == 2
    loss = kinds(profiled(Chain(0)), compiled=True).get("pointwise", 0)
    assert kinds(found, compiled=True)["pointwise"] == 1 + loss
    assert kinds(found, compiled=True, back=True)["pointwise"] == kinds(profiled(Chain(1)), True, True)["pointwise"]


@pytest.mark.parametrize("functions", [1, 4])
def test_a_joined_kernel_reads_and_writes_once(functions: int) -> None:
    kernels = [k for unit in profiled(Chain(functions)).sheet(ROWS, compiled=True).units for k in unit.forward.kernels]
    joined = next(kernel for kernel in kernels if kernel.kind == "pointwise")
    assert joined.bytes == 2 * 4 * ENTRIES


def test_compiled_code_keeps_what_cannot_be_made_again() -> None:
    """Eager code keeps every argument of four sines in a row; compiled code keeps the first, and the last result."""
    eager, compiled = (
        sum(unit.saved for unit in profiled(Chain(4)).sheet(ROWS, compiled=compiled).units)
        for compiled in (False, True)
    )
    one = sum(unit.saved for unit in profiled(Chain(1)).sheet(ROWS, compiled=True).units)
    assert eager - compiled == 3 * 4 * ENTRIES
    assert compiled == one


def test_a_model_of_products_alone_is_as_before() -> None:
    found = profiled(Chain(0))
    eager, compiled = (found.sheet(ROWS, compiled=each).units for each in (False, True))
    assert sum(unit.saved for unit in eager) == sum(unit.saved for unit in compiled)
    assert sum(unit.forward.flops for unit in eager) == pytest.approx(
        sum(unit.forward.flops for unit in compiled), rel=0.05
    )


def test_costs_of_compiled_code_are_interpolated_as_others_are() -> None:
    found = profiled(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))))
    between = found.sheet(7, compiled=True).units
    measured = found._measured_at(1, None, (7, 7), True).units(7)
    for one, other in zip(between, measured, strict=True):
        for name in ("saved", "forward_peak", "backward_peak", "output"):
            assert getattr(one, name) == pytest.approx(getattr(other, name)), name
        assert one.forward.bytes == pytest.approx(other.forward.bytes)
        assert one.backward.bytes == pytest.approx(other.backward.bytes)


def launch(kind: str, made: int, *read: int, over_rows: bool = False) -> KernelLaunch:
    return KernelLaunch(
        kind, 1.0, 100.0, (), "float32", (made,), read, over_rows=over_rows, is_fusable=kind != "product"
    )  # type: ignore[arg-type]


def made_by(launches: list[KernelLaunch], needed: tuple[int, ...]) -> list[tuple[int, ...]]:
    sizes = dict.fromkeys(range(20), 10.0)
    return [tuple(sorted(each.made)) for each in fuse(launches, sizes, needed, back=False)]


def test_no_kernel_is_joined_across_one_that_must_run_between() -> None:
    """3 is made of 1 and of a product of 1, so 1 must be written before."""
    launches = [launch("pointwise", 1, 0), launch("product", 2, 1), launch("pointwise", 3, 1, 2)]
    assert made_by(launches, (3,)) == [(1,), (2,), (3,)]


def test_sums_over_rows_are_kernels_of_their_own() -> None:
    launches = [launch("pointwise", 1, 0), launch("reduction", 2, 1, over_rows=True), launch("pointwise", 3, 1)]
    assert made_by(launches, (2, 3)) == [(1, 3), (2,)]
    assert made_by([launch("pointwise", 1, 0), launch("reduction", 2, 1)], (2,)) == [(2,)]
