"""A table's capacity holds over all servers, however ids fall to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from serving import served
from torch import Tensor, nn

import echelon
from echelon.base.errors import EchelonError
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.job_spec import JobSpec, TableSpec
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.worker.client import IdPartition, ParameterServerClient, WorkerUpdate
from echelon.parameter_server.worker.in_process import InProcessChannel

CAPACITY = 200
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 3 * CAPACITY)


def workers_of(
    servers: int, on_full: str, mode: str = "sync", count: int = 1
) -> tuple[list[ServerShard], list[ParameterServerClient]]:
    table = TableSpec(name="t", dim=2, capacity=CAPACITY, on_full=on_full)
    job = JobSpec(session="s", mode=mode, trainers=count, servers=servers, tables=(table,))
    shards = [ServerShard(index, servers) for index in range(servers)]
    clients = [
        ParameterServerClient([InProcessChannel(shard.handle) for shard in shards], job, worker)
        for worker in range(count)
    ]
    for client in clients:
        client.open()
    clients[0].begin([np.empty(0, np.float32)] * servers)
    return shards, clients


def train(client: ParameterServerClient, ids: np.ndarray) -> None:
    """One step, with the question after it."""
    share = IdPartition.of(ids, len(client.links))
    client.push(WorkerUpdate(weight=1.0, tables={"t": (share, np.ones((len(ids), 2), np.float32))}))
    client.settle()
    client.pull({}, step=client.seq).wait()


def rows(shards: list[ServerShard]) -> int:
    return sum(len(shard.tables["t"]) for shard in shards)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_capacity_ids_fit_and_one_more_is_refused(servers: int, mode: str) -> None:
    shards, (client,) = workers_of(servers, "error", mode)
    for part in np.split(IDS[:CAPACITY], 8):
        train(client, part)
    train(client, IDS[:CAPACITY])  # known ones are no new rows
    assert rows(shards) == CAPACITY
    with pytest.raises(EchelonError, match="table 't' is full"):
        train(client, IDS[CAPACITY : CAPACITY + 1])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_lru_lets_go_only_beyond_the_capacity(servers: int, mode: str) -> None:
    shards, (client,) = workers_of(servers, "lru", mode)
    for part in np.split(IDS[:CAPACITY], 8):
        train(client, part)
    assert rows(shards) == CAPACITY, "all of them fit"
    most = 0
    for part in np.split(IDS[CAPACITY:], 100):
        train(client, part)
        most = max(most, rows(shards))
    assert most <= CAPACITY + 4, "beyond it at most the new ids of one step"
    assert rows(shards) >= CAPACITY - servers * (CAPACITY // 16 + 4), "and no more than needed has gone"
    known = np.concatenate([shard.tables["t"].rows_of(b).ids for shard in shards for b in shard.store.buckets])
    assert np.isin(IDS[-4:], known).all()


def test_async_workers_all_hear_of_a_full_table() -> None:
    """Each brings half of the ids: none of them brings too many by itself."""
    _, clients = workers_of(3, "error", "async", count=2)
    for first, second in zip(np.split(IDS[:CAPACITY], 10)[::2], np.split(IDS[:CAPACITY], 10)[1::2], strict=True):
        train(clients[0], first)
        train(clients[1], second)
    with pytest.raises(EchelonError, match="201 different ids arrived, and its 3 servers hold 200 together"):
        train(clients[1], IDS[CAPACITY : CAPACITY + 1])
    with pytest.raises(EchelonError, match="raise capacity"):
        train(clients[0], IDS[:1])
    train(clients[0], IDS[:1])  # said once for each id too many


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(2, capacity=CAPACITY)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.ids(ids)).squeeze(1)


def fill(directory: str) -> str:
    echelon.init(seed=0)
    model, ids = Model(), torch.from_numpy(IDS)
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=echelon.Strategy(ps="sync"),
        checkpoint=echelon.Checkpoint(dir=directory, asynchronous=False),
        log=echelon.Log(console=False),
    )
    for step in range(engine.steps, 4):
        engine.step(ids[step * 50 :][25 * engine.world.rank :][:25], torch.ones(25))
    engine.save()
    with pytest.raises(EchelonError) as refused:
        engine.step(ids[CAPACITY + engine.world.rank :][:1], torch.ones(1))
    engine.close()
    return str(refused.value)


def test_a_job_fills_its_table_and_refuses_what_is_more(tmp_path: Path) -> None:
    """On two servers, and, from the checkpoint of the full table, on three; both workers are told in the same step."""
    for servers in (2, 3):
        found: list[Any] = served(fill, str(tmp_path), servers=servers, workers=2)
        assert found == [found[0]] * 2
        assert f"202 different ids arrived, and its {servers} servers hold 200 together" in found[0]
