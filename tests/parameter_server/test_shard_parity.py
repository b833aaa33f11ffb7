"""Sync: whatever the numbers of workers and servers, the weights are those of one process on the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shards import DIMS, SHAPES, VOCABULARY, Batch, job, net, started, sync_step

from echelon.optim import FTRL, LAMB, LARS
from echelon.parameter_server.protocol.job_spec import DenseRule
from echelon.strategy.sparse_update_rules import Adagrad, Adam, Ftrl, Momentum, Sgd

STEPS = 12
LAYOUTS = [(1, 1), (1, 3), (2, 2)]  # workers, servers

DENSE = {
    "sgd": ("SGD", torch.optim.SGD, {"lr": 0.1}),
    "momentum": ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": ("Adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adam": ("Adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    "adamw": ("AdamW", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "ftrl": ("FTRL", FTRL, {"lr": 0.1, "l1": 0.001}),
    "lars": ("LARS", LARS, {"lr": 1.0, "coeff": 0.1}),
    "lamb": ("LAMB", LAMB, {"lr": 0.01}),
}


class Rows:
    """Sparse rules as their formulas say them, one row at a time, in float64 but for what is stored."""

    def __init__(self, rule, rows):
        self.rule, self.w, self.step = rule, rows.astype(np.float64), 0
        self.a, self.b = np.zeros_like(self.w), np.zeros_like(self.w)
        if isinstance(rule, Adagrad | Ftrl):
            self.a += rule.initial_accumulator

    def update(self, gradient):
        self.step += 1
        for i in np.flatnonzero(np.abs(gradient).sum(1)):
            self.row(i, gradient[i].astype(np.float64))

    def row(self, i, g):
        r, w, a, b = self.rule, self.w, self.a, self.b
        if isinstance(r, Sgd):
            w[i] -= r.lr * g
        elif isinstance(r, Momentum):
            a[i] = r.momentum * a[i] + g
            w[i] -= r.lr * (g + r.momentum * a[i] if r.nesterov else a[i])
        elif isinstance(r, Adagrad):
            a[i] += (g * g).mean() if r.row_wise else g * g
            w[i] -= r.lr * g / (np.sqrt(a[i]) + r.eps)
        elif isinstance(r, Adam):
            a[i] = r.beta1 * a[i] + (1 - r.beta1) * g
            b[i] = r.beta2 * b[i] + (1 - r.beta2) * g * g
            root = np.sqrt(1 - r.beta2**self.step)  # torch.optim.SparseAdam takes it out of the fraction
            w[i] -= r.lr * root / (1 - r.beta1**self.step) * a[i] / (np.sqrt(b[i]) + r.eps)
        else:
            n = a[i] + g * g
            b[i] += g - (n**-r.lr_power - a[i] ** -r.lr_power) / r.lr * w[i]
            a[i] = n
            w[i] = np.where(
                np.abs(b[i]) <= r.l1, 0, -(b[i] - np.sign(b[i]) * r.l1) / (n**-r.lr_power / r.lr + 2 * r.l2)
            )


class OneProcess:
    """The same model in one process on the whole batch; tables are torch embeddings over the vocabulary."""

    def __init__(self, first_rows, make_dense, sparse):
        self.net, self.place = net(), {int(id): i for i, id in enumerate(VOCABULARY)}
        self.tables = {name: torch.tensor(rows, requires_grad=True) for name, rows in first_rows.items()}
        self.dense, self.sparse = make_dense(self.net), {name: sparse(rows) for name, rows in first_rows.items()}

    def step(self, batch):
        index = {name: torch.tensor(np.vectorize(self.place.get)(getattr(batch, name))) for name in DIMS}
        looked = {name: self.tables[name][index[name]] for name in DIMS}
        self.net.zero_grad()
        (self.net(**looked) - torch.from_numpy(batch.target)).square().mean().backward()
        self.dense.step()
        for name, table in self.tables.items():
            self.sparse[name].update(table.grad.numpy())
            table.grad = None
            table.data = torch.tensor(self.sparse[name].w, dtype=torch.float32)


class TorchRows:
    """A torch optimizer that knows sparse gradients, in place of a formula."""

    def __init__(self, make, rows):
        self.parameter = torch.nn.Parameter(torch.tensor(rows))
        self.optimizer = make([self.parameter])

    def update(self, gradient):
        touched = np.flatnonzero(np.abs(gradient).sum(1))
        with torch.sparse.check_sparse_tensor_invariants(True):
            rows = torch.tensor(gradient[touched])
            self.parameter.grad = torch.sparse_coo_tensor(torch.tensor(touched)[None], rows, gradient.shape)
            self.optimizer.step()

    @property
    def w(self):
        return self.parameter.detach().numpy()


def batches(step, trainers, sizes=(6, 6)):
    return [Batch(100 * step + number, sizes[number]) for number in range(trainers)]


def compare(spec, make_dense, sparse, sizes=(6, 6), steps=STEPS):
    servers, workers = started(spec)
    one = OneProcess({name: servers.rows(name) for name in DIMS}, make_dense, sparse)
    for step in range(steps):
        parts = batches(step, spec.trainers, sizes)
        sync_step(workers, parts)
        one.step(Batch.joined(parts))
        for name in DIMS:
            np.testing.assert_allclose(servers.rows(name), one.tables[name].detach(), rtol=0, atol=1e-6)
        held = servers.dense()
        for name, parameter in one.net.named_parameters():
            np.testing.assert_allclose(held[name], parameter.detach().reshape(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("workers", "servers"), LAYOUTS)
@pytest.mark.parametrize("name", DENSE)
def test_every_dense_optimizer_equals_one_process(name, workers, servers):
    kind, optimizer, settings = DENSE[name]
    spec = job(servers, workers, dense=DenseRule(kind=kind, groups=(settings,)))
    compare(spec, lambda model: optimizer(model.parameters(), **settings), lambda rows: Rows(Sgd(lr=0.1), rows))


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


RULES = {
    "sgd": Sgd(lr=0.2),
    "momentum": Momentum(lr=0.05),
    "nesterov": Momentum(lr=0.05, nesterov=True),
    "adagrad": Adagrad(lr=0.1, initial_accumulator=0.1),
    "row_adagrad": Adagrad(lr=0.1, initial_accumulator=0.1, row_wise=True),
    "adam": Adam(lr=0.01),
    "ftrl": Ftrl(lr=0.1, l1=0.001, l2=0.01),
    "ftrl_power": Ftrl(lr=0.1, lr_power=-0.7),
}


@pytest.mark.parametrize(("workers", "servers"), LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_every_sparse_rule_equals_its_formula(name, workers, servers):
    compare(job(servers, workers, rule=RULES[name]), plain_sgd, lambda rows: Rows(RULES[name], rows))


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (Sgd(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2)),
        (RULES["adagrad"], lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1)),
        (Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    ],
    ids=["sgd", "adagrad", "adam"],
)  # fmt: skip
def test_rules_that_torch_has_for_sparse_gradients_equal_torch(rule, make):
    compare(job(2, 2, rule=rule), plain_sgd, lambda rows: TorchRows(make, rows))


def test_batches_of_different_size_count_by_their_examples():
    rule = RULES["adagrad"]
    compare(job(2, 2, rule=rule), plain_sgd, lambda rows: Rows(rule, rows), sizes=(9, 2))


def test_groups_keep_own_settings_and_schedules_reach_servers():
    groups = ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.01, "momentum": 0.0})
    spec = job(2, 1, dense=DenseRule(kind="SGD", groups=groups))
    servers, (worker,) = started(spec)
    model = net()
    named = list(model.parameters())
    optimizer = torch.optim.SGD(
        [{"params": named[0::2], **groups[0]}, {"params": named[1::2], **groups[1]}], lr=1.0
    )  # fmt: skip
    one = OneProcess(
        {name: servers.rows(name) for name in DIMS}, lambda _: optimizer, lambda rows: Rows(Sgd(lr=0.1), rows)
    )
    one.net = model
    for step in range(STEPS):
        rate = 0.1 / (1 + step)
        optimizer.param_groups[0]["lr"] = rate
        sync_step([worker], batches(step, 1), groups=[{"lr": rate}, {}], lrs={"users": 0.1, "words": 0.1})
        one.step(Batch.joined(batches(step, 1)))
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(servers.dense()[name], parameter.detach().reshape(-1), rtol=0, atol=1e-6)


def test_parameters_left_out_of_layer_wise_rates():
    settings = {"lr": 1.0, "coeff": 0.1, "exclude": ["first.bias", "second.bias"]}
    spec = job(2, 1, dense=DenseRule(kind="LARS", groups=(settings,)))

    def lars(model):
        return LARS(model.parameters(), lr=1.0, coeff=0.1, exclude=[model.first.bias, model.second.bias])

    compare(spec, lars, lambda rows: Rows(Sgd(lr=0.1), rows))


def final(servers_count, workers_count, dense, rule):
    spec = job(servers_count, workers_count, dense=dense, rule=rule)
    servers, workers = started(spec)
    for step in range(STEPS):
        sync_step(workers, batches(step, workers_count))
    return [servers.rows(name) for name in DIMS] + [servers.dense()[name] for name in SHAPES]


@pytest.mark.parametrize("kind", ["momentum", "adagrad", "adam", "adamw", "ftrl", "lars", "lamb"])
def test_the_number_of_servers_does_not_change_a_bit(kind):
    name, _, settings = DENSE[kind]
    dense, rule = DenseRule(kind=name, groups=(settings,)), Adam(lr=0.01)
    one = final(1, 2, dense, rule)
    for count in (2, 3):
        for a, b in zip(one, final(count, 2, dense, rule), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_step_without_examples_moves_nothing_but_the_version():
    servers, workers = started(job(2, 2))
    before = [servers.rows("users"), *servers.dense().values()]
    sync_step(workers, batches(0, 2), weight=0.0)
    assert [shard.version for shard in servers.shards] == [1, 1]
    for a, b in zip(before, [servers.rows("users"), *servers.dense().values()], strict=True):
        np.testing.assert_array_equal(a, b)
