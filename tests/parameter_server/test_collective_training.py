"""Tables in the workers: the same numbers as with servers and as in one process, however rows travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from serving import served
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Adagrad, Adam, Sgd

DIM, SLOTS, STEPS, GLOBAL = 4, 3, 6, 12
RULES = {"sgd": Sgd(lr=0.1), "row_adagrad": Adagrad(lr=0.1, row_wise=True), "adam": Adam(lr=0.05, eps=1e-4)}
IDS = torch.tensor([0, -1, 2**63 - 1, -(2**63), 7, 8, 9, 10, 11, 123456789012345, -5, 42])


def data(count: int = STEPS * GLOBAL) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, len(IDS), (count, SLOTS), generator=generator)
    return IDS[index], torch.randn(count, generator=generator)


class Model(nn.Module):
    """A table for each rule, one of them read twice, bags with weights and padding, and ids that are computed."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: SparseEmbedding(DIM, name=name, optimizer=RULES[name]) for name in RULES})
        self.bag = SparseEmbedding(DIM, name="sgd", optimizer=RULES["sgd"], combiner="mean", padding_id=7)
        self.computes = computes
        self.net = nn.Sequential(nn.Linear(len(RULES) * SLOTS * DIM + DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        bag = self.bag(ids % 5 if self.computes else ids, torch.ones_like(ids) * 0.5)
        rows = [table(ids).flatten(1) for table in self.tables.values()]
        return self.net(torch.cat([*rows, bag], 1)).squeeze(1)


def train(count: int = STEPS * GLOBAL, computes: bool = False, **options: Any) -> dict[str, Any]:
    shared = options.pop("shared", True)
    if not shared:
        from echelon.parameter_server.worker import collective_session

        collective_session.share_memory = lambda *_: None  # type: ignore[assignment]
    echelon.init(seed=0)
    model = Model(computes)
    p = list(model.parameters())
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW(p, lr=0.1) if options.get("lamb") else torch.optim.SGD(p, lr=0.1),
        strategy=echelon.Strategy(**options),
        log=echelon.Log(console=False),
    )
    order: Any = {"shuffle": False, "uneven": "join"}  # at the end some workers have no sample
    losses = [float(engine.step(*batch)) for batch in engine.loader(data(count), global_batch=GLOBAL, **order)]
    judged = engine.evaluate(data(count - 3), batch_size=7)["loss"]
    model.eval()
    with torch.no_grad():
        rows = {name: table(IDS).numpy() for name, table in model.tables.items()}
    dense = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    found = {"losses": losses, "judged": judged, "rows": rows, "dense": dense, "how": getattr(engine.served, "how", "")}
    engine.close()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 2e-6}
    np.testing.assert_allclose(found["losses"], expected["losses"], **tolerance)
    np.testing.assert_allclose(found["judged"], expected["judged"], rtol=1e-5)
    for part in ("rows", "dense"):
        for name, value in expected[part].items():
            np.testing.assert_allclose(found[part][name], value, err_msg=f"{part} {name}", **tolerance)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(train, ranks=1)[0]


@pytest.fixture(scope="module")
def by_servers() -> dict[str, Any]:
    return served(train, servers=2, workers=2, ps=echelon.ParameterServer(dense="allreduce"))[0]


@pytest.mark.parametrize("shared", [True, False])
def test_two_workers_have_the_bits_of_servers(shared: bool, by_servers: Any, alone: Any) -> None:
    for found in run(train, ranks=2, shared=shared):
        assert found["how"] == ("shared memory" if shared else "all-to-all (gloo)")
        compare(found, by_servers, exact=True)
        compare(found, alone, exact=False)


def test_three_workers_uneven_ends_and_computed_ids() -> None:
    count = STEPS * GLOBAL - 10  # the last step has 2 samples for 3 workers
    (expected,) = run(train, count, True, ranks=1)
    for found in run(train, count, True, ranks=3):
        compare(found, expected, exact=False)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_merge": 2, "shard": 1, "clip": 0.05},
        {"shard": 3, "lamb": True, "recompute": echelon.Recompute(checkpoints=("net",))},
        {"ps": echelon.ParameterServer(mode="collective", prefetch=False)},
    ],
    ids=["merged", "sharded", "without prefetch"],
)
def test_dense_options_combine_with_tables(options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if name not in ("shard", "ps")}
    (expected,) = run(train, ranks=1, **plain)
    for found in run(train, ranks=2, **options):
        compare({**found, "dense": {}}, {**expected, "dense": {}}, exact=False)


class Limited(nn.Module):
    """A table that admits ids late, evicts rows when it is full, and one whose rows expire."""

    def __init__(self) -> None:
        super().__init__()
        self.full = SparseEmbedding(DIM, name="full", optimizer="adagrad", capacity=40, on_full="lru", admit_after=2)
        self.fleeting = SparseEmbedding(DIM, name="fleeting", optimizer="sgd", expire_passes=1)
        self.net = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(torch.cat([self.full(ids), self.fleeting(ids)], -1)).sum((1, 2))


def keep_few(**options: Any) -> list[Any]:
    echelon.init(seed=0)
    model = Limited()
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        strategy=echelon.Strategy(**options),
        log=echelon.Log(console=False),
    )
    generator = torch.Generator().manual_seed(5)
    for low in (0, 40, 80):
        ids = torch.randint(low, low + 60, (60, SLOTS), generator=generator)
        for batch in engine.loader((ids, torch.zeros(60)), global_batch=12, shuffle=False):
            engine.step(*batch)
        engine.served.new_pass()
    model.eval()
    with torch.no_grad():
        rows = [table(torch.arange(140)).numpy() for table in (model.full, model.fleeting)]
    engine.close()
    return rows


def test_capacity_admission_and_expiry_are_those_of_servers() -> None:
    expected = served(keep_few, servers=2, workers=2, ps=echelon.ParameterServer(dense="allreduce"))[0]
    for found in run(keep_few, ranks=2):
        for rows, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(rows, wanted)
