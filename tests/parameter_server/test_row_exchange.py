"""Messages of any length between workers, by shared memory and through a process group."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from harness import run
from torch import nn

import echelon
from echelon.distributed import world as worlds
from echelon.nn import SparseEmbedding
from echelon.parameter_server.worker.row_exchange import GroupExchange, RowExchange
from echelon.parameter_server.worker.shared_memory_exchange import share_memory

#: Lengths of messages from a worker to another in turn: none, small, and longer than any before.
LENGTHS = (0, 5, 4096, 100, 300_000, 7, 5_000_000, 0, 4_000_000)


def content(turn: int, sender: int, receiver: int) -> np.ndarray:
    length = LENGTHS[(turn + sender * 2 + receiver) % len(LENGTHS)]
    return np.random.default_rng([turn, sender, receiver]).integers(0, 256, length, dtype=np.uint8)


def exchange_all(shared: bool) -> None:
    world = echelon.init()
    assert world.control is not None
    exchange: RowExchange | None = None
    if shared:
        exchange = share_memory(world.control, 60.0)
        assert exchange is not None
    else:
        exchange = GroupExchange(world.rank, world.size, world.device, 60.0)
    for turn in range(2 * len(LENGTHS)):
        sent = [content(turn, world.rank, other) for other in range(world.size)]
        for memory, message in zip(exchange.outgoing([len(message) for message in sent]), sent, strict=True):
            memory[:] = message
        for other, message in enumerate(exchange.swap(turn % 2)):
            np.testing.assert_array_equal(message, content(turn, other, world.rank))
    exchange.close()


@pytest.mark.parametrize("shared", [True, False])
def test_messages_arrive_whatever_their_lengths(shared: bool) -> None:
    run(exchange_all, shared, ranks=3)


def meet(place: str) -> bool:
    """Worker 1 sees another temporary directory, as in a container of its own."""
    world = echelon.init()
    assert world.control is not None
    if world.rank:
        import tempfile

        tempfile.tempdir = place
    made = share_memory(world.control, 60.0)
    worlds.barrier()
    return made is None


def test_workers_that_cannot_share_memory_all_say_so() -> None:
    assert run(meet, "/tmp/" + "long" * 24, ranks=2) == [True, True]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.net = SparseEmbedding(2, name="rows"), nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(self.rows(ids)).mean()


def copied() -> list[str]:
    echelon.init()
    model = Two()
    engine = echelon.distribute(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=echelon.Log(console=False)
    )
    engine.step(torch.arange(8))
    return list(copy.deepcopy(engine.model).state_dict())


def test_a_model_with_tables_in_workers_can_be_copied() -> None:
    assert run(copied, ranks=2) == [["net.weight", "net.bias"]] * 2
