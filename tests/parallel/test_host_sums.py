"""Gradients summed in memory that the ranks of one host share."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from harness import errors, run
from torch import Tensor, nn

import echelon
from echelon.distributed.host_memory import share_host_memory
from echelon.distributed.world import World
from echelon.engine import parallelize
from echelon.nn import SparseEmbedding
from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.host_sums import CHUNK, HostSums

#: Lengths of rows: none, short, one chunk, some chunks, many.
LENGTHS = (0, 3, CHUNK // 4, 2 * CHUNK // 4 + 5, 7 * CHUNK // 4 + 1)


def sums_of_host(world: World) -> HostSums:
    assert world.control is not None
    memory = share_host_memory(world.control, 1, 30.0, "rank", "sum of gradients")
    assert memory is not None
    return HostSums(memory)


def numbers(step: int, at: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, at, rank]).standard_normal(LENGTHS[at], np.float32))


def add_up() -> list[str]:
    """Sums of several rows under way at once, begun in any order, by a rank that is late in turn."""
    world = echelon.init()
    sums = sums_of_host(world)
    rows = [torch.zeros(length) for length in LENGTHS]
    reduces: list[AllReduce] = [sums.sum_over(row, world.control, "sum", str(at)) for at, row in enumerate(rows)]
    wrong = []
    for step in range(6):
        order = np.random.default_rng([step, world.rank]).permutation(len(rows))
        for at in order:
            reduces[at].entry().copy_(numbers(step, int(at), world.rank))
            reduces[at].start()
        if step % world.size == world.rank:
            torch.randn(500, 500) @ torch.randn(500, 500)
        for at, (row, reduce) in enumerate(zip(rows, reduces, strict=True)):
            reduce.finish()
            expected = numbers(step, at, 0)
            for rank in range(1, world.size):
                expected = expected + numbers(step, at, rank)  # in the order of ranks
            if not torch.equal(row, expected):
                wrong.append(f"step {step}, row {at}")
            row.zero_()  # the owner may change it at once
    sums.memory.close()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_sum_in_the_order_of_ranks(ranks: int) -> None:
    assert run(add_up, ranks=ranks) == [[]] * ranks


def add_up_many() -> float:
    """More sums than a socket takes notes of, all begun before one is finished."""
    world = echelon.init()
    sums = sums_of_host(world)
    rows = [torch.zeros(2) for _ in range(1500)]
    reduces = [sums.sum_over(row, world.control, "sum", "") for row in rows]
    for reduce in reduces:
        reduce.entry().fill_(1.0)
        reduce.start()
    for reduce in reduces:
        reduce.finish()
    return float(sum(row.sum() for row in rows))


def test_many_sums_under_way_do_not_wait_for_each_other() -> None:
    assert run(add_up_many) == [6000.0, 6000.0]


class Clicks(nn.Module):
    """A model with a table, whose dense gradients are summed in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(20)
        self.net = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.net(self.ids(ids))
        return scores


def train(shared: bool, died: bool = False) -> tuple[bool, list[bytes]]:
    world = echelon.init()
    if not shared:
        parallelize.MOST_RANKS = 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = Clicks()
    engine = echelon.distribute(
        model, torch.optim.Adam(model.parameters()), loss=nn.functional.cross_entropy, log=echelon.Log(console=False)
    )
    rng = np.random.default_rng(world.rank)
    for step in range(8):
        rows = 4 + 3 * ((step + world.rank) % 2)  # uneven batches
        ids = torch.from_numpy(rng.integers(0, 50, rows))
        if died and step == 4 and world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(ids, torch.from_numpy(rng.integers(0, 3, rows)))
    (reducer,) = engine._parts.gradients._reducers.values()
    sums = [type(bucket._sum).__name__ for bucket in reducer._buckets]
    return sums == ["HostAllReduce"] * len(sums), [p.detach().numpy().tobytes() for p in model.parameters()]


def test_training_in_shared_memory_has_the_bits_of_messages() -> None:
    by_memory, by_messages = run(train, True), run(train, False)
    assert [is_shared for is_shared, _ in by_memory + by_messages] == [True, True, False, False]
    assert len({tuple(weights) for _, weights in by_memory + by_messages}) == 1


def test_a_rank_that_dies_is_named_at_once() -> None:
    assert errors(train, True, True)[0].endswith("1, which has ended; see its log")


def differ() -> None:
    world = echelon.init()
    sums = sums_of_host(world)
    rows = [torch.ones(4), torch.ones(4)][: 2 - world.rank]
    reduces = [sums.sum_over(row, world.control, "sum", "") for row in rows]
    reduces[-1].start()
    reduces[-1].finish()


def test_ranks_that_sum_other_rows_find_out() -> None:
    first, second = errors(differ)
    assert "rank 0 sums up other gradients than rank 1" in second
    assert "lost contact with rank 1" in first
