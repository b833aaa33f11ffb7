"""The selection of the largest entries, against sorting everything with numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from echelon.base.errors import UsageError
from echelon.parallel.data.topk import largest

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def check(values: np.ndarray, k: int, device: str = "cpu") -> None:
    """Exactly ``k`` different entries, and no other choice has larger magnitudes."""
    tensor = torch.from_numpy(values.copy()).to(device)
    found = largest(tensor, k)
    assert found.dtype == torch.int32
    assert found.device == tensor.device
    assert torch.equal(largest(tensor, k), found), "the same input gave another choice"
    np.testing.assert_array_equal(tensor.cpu().numpy(), values, err_msg="the input was changed")
    chosen = found.cpu().numpy()
    assert chosen.shape == (k,)
    assert np.unique(chosen).size == k
    magnitudes = np.abs(values)
    np.testing.assert_array_equal(np.sort(magnitudes[chosen]), np.sort(magnitudes)[values.size - k :])


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def heavy_tailed(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_cauchy(n) ** 3


def mostly_zero(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * (rng.random(n) < 1e-4)


def half_zero(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * (rng.random(n) < 0.5)


def constant(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.full(n, -3.5)


def nothing_but_zeros(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.zeros(n)


def few_distinct(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(-3, 4, n).astype(np.float32)


def one_block_large(rng: np.random.Generator, n: int) -> np.ndarray:
    values = rng.standard_normal(n) * 1e-3
    values[n // 2 : n // 2 + n // 50] *= 1e4
    return values


def tiny(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * 1e-42  # subnormal numbers, and few different ones


def ascending(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.arange(n)


SHAPES = [normal, heavy_tailed, mostly_zero, half_zero, constant, nothing_but_zeros, few_distinct, one_block_large,
          tiny, ascending]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 1000, 32768, 32769, 150_001, 400_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_the_distribution_the_largest_are_found(
    shape: Callable[[np.random.Generator, int], np.ndarray], n: int, device: str
) -> None:
    values = shape(np.random.default_rng(n), n).astype(np.float32)
    for share in (0.0, 1e-5, 0.001, 0.0155, 0.25, 0.5, 1.0):
        check(values, round(n * share), device)


@pytest.mark.parametrize("large_in_sample", [True, False])
def test_a_sample_that_sees_only_one_side_costs_no_exactness(large_in_sample: bool) -> None:
    n = 100_000
    rng = np.random.default_rng(5)
    for stride in range(2, 26):  # the sample's own, 9 at this size, among them
        values = (rng.random(n) + 1.0).astype(np.float32)
        sampled = np.zeros(n, bool)
        sampled[::stride] = True
        values[sampled == large_in_sample] *= 1000
        for k in (30, 3000, 30_000):
            check(values, k)
        values[sampled] = 0.0  # the sample knows nothing at all
        check(values, 3000)


@given(
    values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=False)),
    data=st.data(),
)
@settings(max_examples=200)
def test_any_short_vector(values: np.ndarray, data: st.DataObject) -> None:
    check(values, data.draw(st.integers(0, values.size)))


@given(
    palette=arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False)),
    period=st.integers(1, 40),
    n=st.integers(32769, 120_000),
    share=st.floats(0.0, 0.4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80)
def test_any_long_vector_of_few_values_and_any_period(
    palette: np.ndarray, period: int, n: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.where(np.arange(n) % period == 0, rng.choice(palette, n), np.float32(rng.standard_normal()))
    check(values.astype(np.float32), int(n * share))


def test_on_a_cpu_indices_ascend_and_the_first_of_equals_win() -> None:
    for n in (100, 100_000):
        values = torch.ones(n)
        values[n // 2] = -2.0
        assert largest(values, 4).tolist() == [0, 1, 2, n // 2]
        found = largest(torch.randn(n, generator=torch.Generator().manual_seed(0)), n // 20)
        assert bool((found[1:] > found[:-1]).all())


@pytest.mark.parametrize("n", [100, 100_000])
def test_topk_non_finite_counts_as_larger_and_keeps_count(n: int) -> None:
    """Values that are not finite count as larger, and never change how many are selected."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(0))
    values[[3, 50]] = float("inf")
    values[7] = float("nan")
    assert largest(values, 1).tolist() == [7]
    assert largest(values, 3).tolist() == [3, 7, 50]
    assert largest(torch.full((n,), float("nan")), 5).shape == (5,)


def test_a_strided_view_that_wants_a_gradient_will_do() -> None:
    values = torch.randn(90_000, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    column = values[:, 1]
    assert torch.equal(largest(column, 900), largest(column.detach().clone(), 900))


@pytest.mark.parametrize(
    ("values", "k", "line"),
    [
        (torch.zeros(3), 4, "asked for the 4 largest of 3 entries; ask for 0 to 3 of them"),
        (torch.zeros(3), -1, "asked for the -1 largest of 3 entries; ask for 0 to 3 of them"),
        (
            torch.zeros(2, 2),
            1,
            "largest() takes a 1-D torch.float32 tensor, not a 2-D torch.float32 one; flatten and cast it first",
        ),
        (
            torch.zeros(2, dtype=torch.float64),
            1,
            "largest() takes a 1-D torch.float32 tensor, not a 1-D torch.float64 one; flatten and cast it first",
        ),
    ],
)
def test_what_cannot_be_is_refused(values: torch.Tensor, k: int, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        largest(values, k)
    assert str(caught.value) == line
