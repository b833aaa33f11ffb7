"""Ragged columns: bags of ids of any size, from a data set to a table, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon.base.errors import DataError
from echelon.data import Loader, RaggedColumns
from echelon.nn import Packed, SparseEmbedding, pack
from echelon.strategy.sparse_update_rules import Sgd

BAGS = [[5, -7, 5], [], [9], [], [2**62, 5], [1], [], [-7, 3]]


def ragged() -> RaggedColumns:
    values = torch.tensor([id for bag in BAGS for id in bag])
    offsets = torch.tensor([0, *(len(bag) for bag in BAGS)]).cumsum(0)
    return RaggedColumns((values, offsets), torch.arange(len(BAGS)).float())


def bags_of(batch: Any) -> list[tuple[list[int], float]]:
    bags, numbers = batch
    return [(bag.tolist(), number) for bag, number in zip(bags.unpack(), numbers.tolist(), strict=True)]


def test_batches_have_the_bags_of_their_samples() -> None:
    data = ragged()
    expected = [(bag, float(at)) for at, bag in enumerate(BAGS)]
    assert [(data[at][0].tolist(), data[at][1].item()) for at in range(len(data))] == expected
    assert [
        pair for batch in Loader(data, batch_size=3, shuffle=False, uneven="join") for pair in bags_of(batch)
    ] == expected
    shuffled = [pair for batch in Loader(data, batch_size=3, uneven="join") for pair in bags_of(batch)]
    assert shuffled != expected
    assert sorted(shuffled, key=lambda pair: pair[1]) == expected
    ranks = [iter(Loader(data, batch_size=2, rank=rank, world_size=2, shuffle=False)) for rank in range(2)]
    assert [pair for batches in zip(*ranks, strict=True) for batch in batches for pair in bags_of(batch)] == expected


class Tags(nn.Module):
    def __init__(self, combiner: str) -> None:
        super().__init__()
        self.table = SparseEmbedding(3, combiner=combiner, optimizer=Sgd(lr=0.5))  # type: ignore[arg-type]
        self.head = nn.Linear(3, 1)

    def forward(self, tags: Packed) -> Tensor:
        return self.head(self.table(tags)).squeeze(1)


def padded(bags: list[list[int]]) -> Tensor:
    return torch.tensor([bag + [0] * (3 - len(bag)) for bag in bags])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_ragged_bags_train_what_padded_bags_train(combiner: str) -> None:
    """Also with batches in which no bag has an id."""
    found = []
    for is_ragged in (True, False):
        torch.manual_seed(0)
        model = Tags(combiner)
        model.table.padding_id = 0
        engine = echelon.distribute(
            model,
            loss=lambda output, target: (output - target).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            log=QUIET,
        )
        losses = []
        for bags in (BAGS[:3], BAGS[3:], [[], []], BAGS):
            batch = pack([torch.tensor(bag, dtype=torch.int64) for bag in bags]) if is_ragged else padded(bags)
            losses.append(engine.step(batch, torch.arange(len(bags)).float()).item())
        ids = torch.tensor([[5], [-7], [9], [2**62], [1], [3]])
        found.append([torch.tensor(losses), model.table(ids).detach(), model.head.weight.detach().clone()])
        engine.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_weights_of_ragged_bags_are_ragged_too() -> None:
    model = Tags("mean")
    engine = echelon.distribute(
        model, loss=lambda output, _: output.mean(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=QUIET
    )
    ids, weights = (
        pack([torch.tensor([4, 5]), torch.tensor([6])]),
        pack([torch.tensor([1.0, 3.0]), torch.tensor([2.0])]),
    )
    with torch.no_grad():
        rows = model.table(torch.tensor([[4], [5], [6]]))
        expected = torch.stack([(rows[0] + 3 * rows[1]) / 4, rows[2]])
        torch.testing.assert_close(model.table(ids, weights), expected)
    engine.close()


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ((), "needs a column at least"),
        ((torch.arange(3), torch.arange(4)), r"columns have \[3, 4\] samples"),
        (((torch.arange(3), torch.tensor([0, 2])),), "rise from 0 to its 3 values, got 0 to 2"),
        (((torch.arange(3), torch.tensor([0, 2, 1, 3])),), "got 0 to 3, not rising"),
    ],
)
def test_columns_that_do_not_fit_are_one_line(columns: Any, line: str) -> None:
    with pytest.raises(DataError, match=line):
        RaggedColumns(*columns)
