"""The rules of a table, against torch's optimizers, Echelon's FTRL, and numpy in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from echelon.base.errors import UsageError
from echelon.optim import FTRL
from echelon.parameter_server.protocol.job_spec import Initializer, TableSpec
from echelon.parameter_server.table import Table
from echelon.strategy.sparse_update_rules import NAMED, Adagrad, Adam, Ftrl, Momentum, Rule, Sgd

IDS = np.array([3, -7, 2**62, 11, 0, 5, -1, 8], np.int64)
STEPS = 12


@pytest.fixture(autouse=True)
def checked_sparse_tensors() -> Iterator[None]:
    """Torch warns of sparse tensors that are neither checked nor said to be good."""
    torch.set_num_threads(1)
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def table_of(rule: Rule, dim: int) -> Table:
    return Table(TableSpec(name="t", dim=dim, rule=rule, seed=1, initializer=Initializer(low=-0.5, high=0.5)))


def batches(dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows that have a gradient in each step, and their gradients."""
    rng = np.random.default_rng(dim)
    chosen = [rng.permutation(len(IDS))[: rng.integers(1, len(IDS) + 1)] for _ in range(STEPS)]
    return [(rows, rng.standard_normal((len(rows), dim)).astype(np.float32)) for rows in chosen]


def sparse(rows: np.ndarray, grads: np.ndarray) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.from_numpy(rows)[None], torch.from_numpy(grads), (len(IDS), grads.shape[1]))


@pytest.mark.parametrize("dim", [1, 3, 16, 21])
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (Sgd(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (Adagrad(lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
        (Adagrad(lr=0.2, initial_accumulator=0.3, eps=1e-4),
         lambda p: torch.optim.Adagrad(p, lr=0.2, initial_accumulator_value=0.3, eps=1e-4)),
        (Adam(lr=0.05), lambda p: torch.optim.SparseAdam(p, lr=0.05)),
        (Adam(lr=0.05, beta1=0.7, beta2=0.9, eps=1e-5),
         lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.7, 0.9), eps=1e-5)),
    ],
    ids=["sgd", "adagrad", "adagrad-set", "adam", "adam-set"],
)  # fmt: skip
def test_sparse_rules_equal_torch(
    rule: Rule, optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], dim: int
) -> None:
    table = table_of(rule, dim)
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(IDS)))
    reference = optimizer([weight])
    for rows, grads in batches(dim):
        weight.grad = sparse(rows, grads)
        reference.step()
        table.push(IDS[rows], grads)
        np.testing.assert_allclose(table.pull(IDS), weight.detach().numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_equals_torch_when_every_row_has_a_gradient(nesterov: bool) -> None:
    table = table_of(Momentum(lr=0.1, momentum=0.8, nesterov=nesterov), 6)
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(IDS)))
    reference = torch.optim.SGD([weight], lr=0.1, momentum=0.8, nesterov=nesterov)
    for step in range(STEPS):
        grads = np.random.default_rng(step).standard_normal((len(IDS), 6)).astype(np.float32)
        weight.grad = torch.from_numpy(grads)
        reference.step()
        table.push(IDS, grads)
        np.testing.assert_allclose(table.pull(IDS), weight.detach().numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (Ftrl(lr=0.1), lambda p: FTRL(p, lr=0.1)),
        (Ftrl(lr=0.1, l1=0.4, l2=0.2, lr_power=-0.7, initial_accumulator=0.5),
         lambda p: FTRL(p, lr=0.1, l1=0.4, l2=0.2, lr_power=-0.7, initial_accumulator=0.5)),
    ],
    ids=["plain", "set"],
)  # fmt: skip
def test_ftrl_equals_the_dense_one(
    rule: Rule, optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> None:
    table = table_of(rule, 5)
    # one parameter a row: a dense optimizer moves every row it is given, a table only those with a gradient
    rows_of = [torch.nn.Parameter(row) for row in torch.from_numpy(table.pull(IDS))]
    reference = optimizer(rows_of)
    for rows, grads in batches(5):
        for row in rows_of:
            row.grad = None
        for place, grad in zip(rows, grads, strict=True):
            rows_of[place].grad = torch.from_numpy(grad)
        reference.step()
        table.push(IDS[rows], grads)
        expected = torch.stack([row.detach() for row in rows_of]).numpy()
        np.testing.assert_allclose(table.pull(IDS), expected, atol=1e-6, rtol=2e-6)
    if rule.l1:  # type: ignore[union-attr]
        assert (table.pull(IDS) == 0).any(), "l1 made no weight zero"


def test_ftrl_without_an_accumulator_leaves_no_nan() -> None:
    table = table_of(Ftrl(initial_accumulator=0.0), 4)
    table.push(IDS, np.zeros((len(IDS), 4), np.float32))
    np.testing.assert_array_equal(table.pull(IDS), np.zeros((len(IDS), 4), np.float32))


@pytest.mark.parametrize("dim", [1, 4, 7, 16])
def test_row_wise_adagrad_equals_numpy(dim: int) -> None:
    table = table_of(Adagrad(lr=0.2, row_wise=True, initial_accumulator=0.1), dim)
    weight, total = table.pull(IDS).astype(np.float64), np.full(len(IDS), 0.1)
    for rows, grads in batches(dim):
        total[rows] += (grads.astype(np.float64) ** 2).mean(axis=1)
        weight[rows] -= 0.2 * grads / (np.sqrt(total[rows]) + 1e-10)[:, None]
        table.push(IDS[rows], grads)
        np.testing.assert_allclose(table.pull(IDS), weight, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(table.pull_state(IDS)[:, dim], total, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_rule_repeats_its_bits_whatever_shares_the_push(name: str) -> None:
    together, apart = table_of(NAMED[name], 16), table_of(NAMED[name], 16)
    for rows, grads in batches(16):
        together.push(IDS[rows], grads)
        for place, grad in zip(rows[::-1], grads[::-1], strict=True):
            apart.push(IDS[[place]], grad[None])
            apart.step -= 1
        apart.step += 1
    np.testing.assert_array_equal(together.pull_state(IDS), apart.pull_state(IDS))
    assert together.step == apart.step == STEPS


def test_a_rate_given_with_the_push_counts_for_it_alone() -> None:
    table = table_of(Sgd(lr=1.0), 2)
    before = table.pull(IDS)
    ones = np.ones((len(IDS), 2), np.float32)
    table.push(IDS, ones, lr=0.25)
    table.push(IDS, ones)
    np.testing.assert_allclose(table.pull(IDS), before - 1.25, atol=1e-6)


def test_ftrl_refuses_a_rate_of_zero_before_anything_moves() -> None:
    table = table_of(Ftrl(), 2)
    with pytest.raises(UsageError, match="divides by its learning rate"):
        table.push(IDS, np.ones((len(IDS), 2), np.float32), lr=0.0)
    assert (len(table), table.step) == (0, 0)


def test_an_empty_push_is_a_step() -> None:
    """Adam's bias correction must not depend on which server a batch's ids went to."""
    one, two = table_of(Adam(), 2), table_of(Adam(), 2)
    nobody = np.empty(0, np.int64), np.empty((0, 2), np.float32)
    one.push(*nobody)
    two.step = 1
    for table in (one, two):
        table.push(IDS, np.ones((len(IDS), 2), np.float32))
    np.testing.assert_array_equal(one.pull(IDS), two.pull(IDS))
    assert one.step == 2


def test_adding_moves_weights_and_state_and_makes_rows() -> None:
    table = table_of(Adagrad(initial_accumulator=0.5), 3)
    before = table.pull_state(IDS)
    deltas = np.random.default_rng(0).standard_normal((len(IDS), 6)).astype(np.float32)
    table.add(IDS[:4], deltas[:4])
    table.add(IDS, deltas)
    np.testing.assert_array_equal(table.pull_state(IDS[:4]), before[:4] + deltas[:4] + deltas[:4])
    np.testing.assert_array_equal(table.pull_state(IDS[4:]), before[4:] + deltas[4:])
    assert (len(table), table.step) == (len(IDS), 2)
