"""A job with servers, through the engine and real sockets, against plain torch in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from serving import served
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding
from echelon.optim import FTRL, LAMB, LARS
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table
from echelon.parameter_server.worker.job_description import table_seed
from echelon.strategy.sparse_update_rules import NAMED, Adagrad, Adam, Ftrl, Momentum, Sgd

DIM, SLOTS, STEPS, GLOBAL = 4, 3, 8, 16
IDS = np.array([0, -1, 2**63 - 1, -(2**63), 7, 8, 9, 10, 11, 123456789012345, -5, 42])

RULES = {
    "sgd": Sgd(lr=0.1),
    "momentum": Momentum(lr=0.05, momentum=0.8),
    "adagrad": Adagrad(lr=0.1, initial_accumulator=0.01),
    "row_adagrad": Adagrad(lr=0.1, row_wise=True),
    "adam": Adam(lr=0.05, eps=1e-4),
    "ftrl": Ftrl(lr=0.1, l1=0.001),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "ftrl": lambda p: FTRL(p, lr=0.1),
    "lars": lambda p: LARS(p, lr=1.0),
    "lamb": lambda p: LAMB(p, lr=0.01),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, len(IDS), (STEPS * GLOBAL, SLOTS), generator=generator)
    return torch.from_numpy(IDS)[index], torch.randn(STEPS * GLOBAL, generator=generator)


class Model(nn.Module):
    """One table for every rule, all read with the same ids, and dense layers of which one is cut into blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: SparseEmbedding(DIM, name=name, optimizer=RULES[name]) for name in RULES})
        self.net = nn.Sequential(nn.Linear(len(RULES) * SLOTS * DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(torch.cat([table(ids).flatten(1) for table in self.tables.values()], 1)).squeeze(1)


def train(optimizer: str, directory: str | None = None, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """With a directory, from the checkpoint there until ``steps`` are done, and then saved."""
    echelon.init(seed=0)
    model = Model()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        strategy=echelon.Strategy(ps=echelon.ParameterServer(min_block_size=64, **settings)),
        checkpoint=echelon.Checkpoint(dir=directory, asynchronous=False) if directory else None,
        log=echelon.Log(console=False),
    )
    losses = []
    for batch in engine.loader(data(), global_batch=GLOBAL, shuffle=False):
        losses.append(float(engine.step(*batch)))
        if directory and engine.steps == steps:
            engine.save()
            break
    shown = {name: value.clone().numpy() for name, value in model.state_dict().items()}  # nothing asked for it
    own = engine.served.staleness
    engine.synchronize()
    judged = engine.evaluate(data(), batch_size=7)["loss"]
    ids = torch.from_numpy(IDS)
    with torch.no_grad():
        rows = {name: table(ids).numpy() for name, table in model.tables.items()}
    dense = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    stats = engine.served.stats()
    engine.close()
    found = {"losses": losses, "rows": rows, "dense": dense, "stats": stats, "judged": judged}
    return found | {"shown": shown, "own": own}


class Row:
    """One table's rows in numpy, moved by its rule; only rows that have a gradient move."""

    def __init__(self, name: str) -> None:
        self.rule = RULES[name]
        spec = TableSpec(name=name, dim=DIM, seed=table_seed(0, name), rule=self.rule)
        self.w = Table(spec).pull(IDS).astype(np.float64)  # no row is there: these are the first values
        start = getattr(self.rule, "initial_accumulator", 0.0)
        self.a, self.b, self.t = np.full_like(self.w, start), np.zeros_like(self.w), 0

    def step(self, g: np.ndarray, touched: np.ndarray) -> None:
        self.t += 1
        rule, w, a, b = self.rule, self.w[touched], self.a[touched], self.b[touched]
        g = g[touched]
        if isinstance(rule, Sgd):
            w = w - rule.lr * g
        elif isinstance(rule, Momentum):
            b = rule.momentum * b + g
            w = w - rule.lr * b
        elif isinstance(rule, Adagrad):
            a = a + ((g * g).mean(1, keepdims=True) if rule.row_wise else g * g)
            w = w - rule.lr * g / (np.sqrt(a) + rule.eps)
        elif isinstance(rule, Adam):
            a = rule.beta1 * a + (1 - rule.beta1) * g
            b = rule.beta2 * b + (1 - rule.beta2) * g * g
            root = np.sqrt(b) + rule.eps
            w = w - rule.lr * np.sqrt(1 - rule.beta2**self.t) / (1 - rule.beta1**self.t) * a / root
        else:
            new = a + g * g
            b = b + g - (np.sqrt(new) - np.sqrt(a)) / rule.lr * w
            a = new
            w = np.where(np.abs(b) <= rule.l1, 0, -(b - np.sign(b) * rule.l1) / (np.sqrt(a) / rule.lr + 2 * rule.l2))
        self.w[touched], self.a[touched], self.b[touched] = w, a, b


def alone(optimizer: str) -> dict[str, Any]:
    """The same training in plain torch, with rows as parameters of a small embedding and numpy for their rules."""
    torch.manual_seed(0)
    import random

    random.seed(0)
    net = Model().net
    rows = {name: Row(name) for name in RULES}
    stepper = OPTIMIZERS[optimizer](net.parameters())
    ids, wanted = data()
    index = torch.tensor([[int(np.flatnonzero(i == IDS)[0]) for i in row] for row in ids.tolist()])
    losses = []
    for at in range(0, len(ids), GLOBAL):
        leaves = {name: torch.tensor(row.w, dtype=torch.float32, requires_grad=True) for name, row in rows.items()}
        here = index[at : at + GLOBAL]
        inputs = torch.cat([F.embedding(here, leaf).flatten(1) for leaf in leaves.values()], 1)
        loss = F.mse_loss(net(inputs).squeeze(1), wanted[at : at + GLOBAL])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        touched = np.unique(here.numpy())
        for name, leaf in leaves.items():
            rows[name].step(leaf.grad.double().numpy(), touched)
        losses.append(loss.item())
    dense = {f"net.{name}": value.detach().numpy() for name, value in net.named_parameters()}
    return {"losses": losses, "rows": {name: row.w for name, row in rows.items()}, "dense": dense}


def compare(found: dict[str, Any], expected: dict[str, Any], losses: bool = True) -> None:
    if losses:
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    for part, wanted in (("rows", "rows"), ("dense", "dense"), ("shown", "dense")):
        for name, value in expected[wanted].items():
            np.testing.assert_allclose(found[part][name], value, rtol=1e-5, atol=2e-6, err_msg=f"{part} {name}")


def test_the_names_cover_every_rule() -> None:
    assert set(RULES) == set(NAMED)


@pytest.mark.parametrize(
    ("optimizer", "workers", "servers"),
    [
        *(("adam", w, s) for w, s in ((1, 1), (1, 3), (2, 1), (2, 2))),
        *((name, 2, 2) for name in ("adagrad", "ftrl", "lars", "lamb")),  # the rest: test_shard_parity.py
    ],
)
def test_sync_equals_one_process(optimizer: str, workers: int, servers: int) -> None:
    expected = alone(optimizer)
    found = served(train, optimizer, servers=servers, workers=workers)
    for worker in found:
        compare(worker, expected)  # the losses, too, are those of all workers
    assert found[0]["judged"] == pytest.approx(found[-1]["judged"], abs=1e-6)  # of all the data, on every worker
    assert [server["version"] for server in found[0]["stats"]] == [STEPS] * servers


def test_a_job_without_servers_is_the_same() -> None:
    from harness import run

    (found,) = run(train, "adam", ranks=1)
    compare(found, alone("adam"))


def test_dense_parameters_between_workers_and_tables_on_servers() -> None:
    found = served(train, "adam", servers=2, workers=2, mode="sync", dense="allreduce")
    for worker in found:
        compare(worker, alone("adam"))


def test_the_number_of_servers_changes_no_bit() -> None:
    one, three = (served(train, "adam", servers=s, workers=2)[0] for s in (1, 3))
    for part in ("rows", "dense"):
        for name in one[part]:
            np.testing.assert_array_equal(one[part][name], three[part][name])


def test_async_without_prefetch_of_one_worker_is_one_process() -> None:
    (found,) = served(train, "momentum", servers=2, workers=1, mode="async", prefetch=False)
    compare(found, alone("momentum"))


def test_geo_of_one_worker_is_one_process() -> None:
    (found,) = served(train, "momentum", servers=2, workers=1, mode="geo", k_steps=3)
    compare(found, alone("momentum"))


def late() -> dict[str, Any]:
    """Async with prefetch, one worker, plain SGD: what a step reads misses the update before it.

    Which parts of a batch hold ids is known after the first step, so the second one's rows are read in its own time.
    """
    torch.manual_seed(0)
    net, tables = Model().net, {name: Row(name) for name in RULES}
    past = [({n: row.w.copy() for n, row in tables.items()}, [p.detach().clone() for p in net.parameters()])]
    ids, wanted = data()
    index = torch.tensor([[int(np.flatnonzero(i == IDS)[0]) for i in row] for row in ids.tolist()])
    losses = []
    for step, at in enumerate(range(0, len(ids), GLOBAL)):
        rows = past[max(0, step - 1 if step > 1 else step)][0]
        dense = past[max(0, step - 1)][1]
        values = [p.clone().requires_grad_() for p in dense]
        leaves = {name: torch.tensor(row, dtype=torch.float32, requires_grad=True) for name, row in rows.items()}
        here = index[at : at + GLOBAL]
        inputs = torch.cat([F.embedding(here, leaf).flatten(1) for leaf in leaves.values()], 1)
        hidden = torch.tanh(F.linear(inputs, values[0], values[1]))
        loss = F.mse_loss(F.linear(hidden, values[2], values[3]).squeeze(1), wanted[at : at + GLOBAL])
        loss.backward()
        for name, leaf in leaves.items():
            tables[name].step(leaf.grad.double().numpy(), np.unique(here.numpy()))
        newest = [old - 0.1 * value.grad for old, value in zip(past[-1][1], values, strict=True)]
        past.append(({name: row.w.copy() for name, row in tables.items()}, newest))
        losses.append(loss.item())
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    dense = {name: value.numpy() for name, value in zip(names, past[-1][1], strict=True)}
    return {"losses": losses, "rows": past[-1][0], "dense": dense}


@pytest.mark.parametrize("servers", [1, 2])
def test_async_with_prefetch_reads_one_update_late(servers: int) -> None:
    (found,) = served(train, "sgd", servers=servers, workers=1, mode="async")
    compare(found, late())
    assert found["own"] == 0.0, "no other worker made an update"
    assert [server["staleness"]["max"] for server in found["stats"]] == [0] * servers


@pytest.mark.parametrize("dense", ["servers", "allreduce"])
def test_a_checkpoint_of_two_servers_goes_on_with_three(tmp_path: Path, dense: str) -> None:
    served(train, "adam", str(tmp_path), 3, servers=2, workers=2, dense=dense)
    for worker in served(train, "adam", str(tmp_path), servers=3, workers=2, dense=dense):
        assert len(worker["losses"]) == STEPS - 3
        compare(worker, alone("adam"), losses=False)


class Counted(nn.Module):
    """Its one row moves by one in every step, if what the workers push is divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.row = SparseEmbedding(2, optimizer=Sgd(lr=1.0), initializer=0.0)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.row(ids).sum((1, 2)).mean() + 0 * self.scale.sum()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def count(directory: str) -> list[float]:
    """Worker 2 comes when the others have made some steps, and leaves before they are done."""
    expected, place = echelon.init(seed=0).rank < 2, Path(directory)
    if not expected:
        wait_for(place / "under-way")
    model = Counted()
    engine = echelon.distribute(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps="sync"),
        log=echelon.Log(console=False),
    )
    (place / f"came-{engine.world.rank}").touch()
    for step in range(60 if expected else 5):
        if step == 30:
            wait_for(place / "came-2")
        engine.step(torch.full((4, 1), 7))
        if step == 4:
            (place / "under-way").touch()
    engine.synchronize()
    with torch.no_grad():
        row = model.row(torch.tensor([7])).flatten().tolist()
    engine.close()
    return row


def test_worker_that_joins_and_leaves_changes_only_the_divisor(tmp_path: Path) -> None:
    first, second, late = served(count, str(tmp_path), servers=2, workers=3, late=1)
    assert first == second == [-60.0, -60.0]
    assert -60 < late[0] <= -10  # it came after some steps of the others, and saw its own five
