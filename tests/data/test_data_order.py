"""The order of the samples: one for all numbers of ranks, and what each policy makes of its ragged end."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from echelon.data import Loader
from echelon.data.order import ComputedOrder, epoch_order


class Squares(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"n": index, "square": float(index**2)}


class Counting(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return ({"n": n, "square": float(n**2)} for n in range(self.size))


KINDS = {
    "map": Squares,
    "list": lambda size: [{"n": n, "square": float(n**2)} for n in range(size)],
    "stream": Counting,
}


def numbers(batch):
    return batch["n"].tolist() if isinstance(batch, dict) else batch[0].tolist()


def by_step(dataset, world_size, global_batch, epochs=1, **options):
    """For every step of every epoch, each rank's samples."""
    ranks = []
    for rank in range(world_size):
        loader = Loader(
            dataset, batch_size=global_batch // world_size, rank=rank, world_size=world_size, seed=7, **options
        )
        ranks.append([numbers(batch) for _ in loader.epochs(epochs) for batch in loader])
    return list(zip(*ranks, strict=True))


def joined(step):
    return [number for share in step for number in share]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_number_of_ranks_takes_the_same_steps(kind, shuffle):
    alone = [joined(step) for step in by_step(KINDS[kind](60), 1, 12, epochs=2, shuffle=shuffle, shuffle_buffer=16)]
    assert sorted(joined(alone[:5])) == list(range(60))
    for world_size in (2, 3, 4):
        steps = by_step(KINDS[kind](60), world_size, 12, epochs=2, shuffle=shuffle, shuffle_buffer=16)
        assert [joined(step) for step in steps] == alone
    assert (alone[:5] == alone[5:]) is not shuffle, "each epoch has a shuffle of its own"


def test_order_depends_on_seed_and_not_on_kind_of_indexed_data():
    tensors = (torch.arange(50), torch.arange(50) ** 2)
    orders = [
        [numbers(batch) for batch in Loader(data, batch_size=8, seed=seed)]
        for seed in (0, 1)
        for data in (tensors, TensorDataset(*tensors), (np.arange(50), np.arange(50)), Squares(50))
    ]
    assert orders[0] == orders[1] == orders[2] == orders[3] != orders[4]
    assert orders[4] == orders[7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pad_shows_every_sample_in_equal_shares_per_rank(kind, world_size):
    """With padding every sample is seen, and all ranks get the same number of samples in each step."""
    steps = by_step(KINDS[kind](41), world_size, 12)
    seen = Counter(number for step in steps for number in joined(step))
    assert set(seen) == set(range(41))
    assert sum(seen.values()) - 41 == -5 % world_size
    assert all(len({len(share) for share in step}) == 1 for step in steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_drop_keeps_full_batches_only(kind, world_size):
    steps = by_step(KINDS[kind](41), world_size, 12, uneven="drop")
    seen = Counter(number for step in steps for number in joined(step))
    assert len(steps) == 3
    assert sum(seen.values()) == len(seen) == 36


def shares_of(dataset, world_size, global_batch):
    """Each rank's (share, numbers) for every step, under ``uneven="join"``."""
    ranks = []
    for rank in range(world_size):
        shares = []
        loader = Loader(
            dataset,
            batch_size=global_batch // world_size,
            rank=rank,
            world_size=world_size,
            uneven="join",
            on_share=shares.append,
        )
        ranks.append([(shares[-1], numbers(batch)) for batch in loader])
    return ranks


@pytest.mark.parametrize("kind", KINDS)
def test_join_shows_every_sample_once(kind):
    for world_size, expected in ((1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (4, [2, 1, 1, 1])):
        ranks = shares_of(KINDS[kind](41), world_size, 12)
        assert sorted(n for rank in ranks for share, batch in rank for n in batch[:share]) == list(range(41))
        assert [rank[-1][0] for rank in ranks] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_sample_stands_in_with_its_last_batch(kind):
    ranks = shares_of(KINDS[kind](26), 4, 12)  # two samples are left for four ranks
    assert [rank[-1][0] for rank in ranks] == [1, 1, 0, 0]
    for rank in ranks[2:]:
        assert rank[-1][1] == rank[-2][1]
        assert len(rank[-1][1]) == 3


def test_the_share_is_told_before_the_batch_is_handed_out():
    told = []
    loader = Loader(Squares(10), batch_size=4, on_share=lambda n: told.append((n, loader.position)))
    for step, batch in enumerate(loader, start=1):
        assert told[-1] == (len(batch["n"]), step)
    assert told == [(4, 1), (4, 2), (2, 3)]


@pytest.mark.parametrize(("uneven", "steps"), [("pad", 4), ("join", 4), ("drop", 3)])
def test_len_counts_the_steps_of_an_epoch(uneven, steps):
    loader = Loader(Squares(41), batch_size=6, world_size=2, uneven=uneven)
    assert len(loader) == steps == sum(1 for _ in loader)
    assert loader.global_batch == 12
    assert loader.total_steps is None
    loader.epochs(3)
    assert loader.total_steps == 3 * steps


def test_a_stream_hears_of_its_epoch():
    class Told(Counting):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([{"n": 100 * self.epoch + n} for n in range(4)])

    loader = Loader(Told(4), batch_size=4, shuffle=False)
    assert [numbers(batch) for _ in loader.epochs(2) for batch in loader] == [[0, 1, 2, 3], [100, 101, 102, 103]]


def test_an_epoch_left_early_counts_as_done():
    loader, visited = Loader(Squares(20), batch_size=4), []
    for epoch in loader.epochs(4):
        for _ in loader:
            visited.append((epoch, loader.epoch, loader.position))
            if epoch % 2 == 0:
                break
    assert [epoch for epoch, _, position in visited if position == 1] == [0, 1, 2, 3]
    assert len(visited) == 1 + 5 + 1 + 5
    assert all(epoch == of_loader for epoch, of_loader, _ in visited)
    assert list(loader.epochs(4)) == []


def test_a_plain_loop_after_a_break_begins_the_next_epoch():
    loader = Loader(Squares(20), batch_size=4)
    next(iter(loader))
    whole = [numbers(batch) for batch in loader]
    other = Loader(Squares(20), batch_size=4)
    assert whole == [[numbers(batch) for batch in other] for _ in range(2)][1]


@pytest.mark.parametrize("size", [1, 2, 3, 97, 1000, 20_011])
def test_a_computed_order_holds_each_sample_once(size):
    computed = ComputedOrder(size, 7, 1)
    pieces = [computed.take(at, min(at + 13, computed.end(at, 13))) for at in range(0, size, 13)]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(size))
    assert np.array_equal(ComputedOrder(size, 7, 1).take(size // 2, size), np.concatenate(pieces)[size // 2 :])


def test_a_computed_order_is_as_mixed_as_a_shuffled_one():
    size = 2**16
    first, second = (ComputedOrder(size, 7, epoch).take(0, size) for epoch in range(2))
    places = np.arange(size)
    for one, other in ((first, places), (second, places), (first, second), (first[:-1], first[1:])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)
        assert (one == other).sum() < 10  # 1 on average
    counts = np.histogram(first[: size // 16], bins=64)[0]  # the first part of an epoch comes from everywhere
    assert abs(((counts - 64) ** 2 / 64).sum() - 63) < 5 * np.sqrt(126)


def test_an_order_of_1e12_samples_takes_no_memory():
    order = epoch_order(10**12, seed=1, epoch=2, shuffle=True)
    taken = order.take(5 * 10**11, 5 * 10**11 + 64)
    assert len(set(taken.tolist())) == 64
    assert 0 <= taken.min() < taken.max() < 10**12
    assert np.array_equal(
        taken[10:], epoch_order(10**12, seed=1, epoch=2, shuffle=True).take(5 * 10**11 + 10, 5 * 10**11 + 64)
    )
    assert epoch_order(10**12, seed=1, epoch=2, shuffle=False).take(7, 9).tolist() == [7, 8]
