"""Streams with a state: a resume reads a little, not the stream from its beginning, and gives the same batches."""

import json

import pytest
import torch
from torch.utils.data import IterableDataset

from echelon.data import Loader

SIZE = 2003


class Counter(IterableDataset):
    """Numbers with a state as streams of other libraries have one; ``reads`` are those of all passes."""

    def __init__(self, size=SIZE):
        self.size, self.reads = size, 0
        self._at, self._start, self._epoch = 0, 0, 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def state_dict(self):
        return {"at": self._at, "shards": {"index": [self._at % 7, None]}}

    def load_state_dict(self, state):
        self._start = state["at"]

    def __iter__(self):
        begin, self._start = self._start, 0
        for number in range(begin, self.size):
            self._at = number + 1
            self.reads += 1
            yield {"n": 10_000 * self._epoch + number, "noise": torch.rand(1)}


class Plain(Counter):
    state_dict = load_state_dict = None


def batches(loader):
    return [torch.cat([batch["n"].double(), batch["noise"][:, 0].double()]) for batch in loader]


def same(some, others):
    assert len(some) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def opened(data, uneven="pad", shuffle=True, workers=0, rank=0, world=1, batch=12):
    return Loader(
        data,
        batch_size=batch // world,
        shuffle=shuffle,
        shuffle_buffer=50,
        uneven=uneven,
        workers=workers,
        rank=rank,
        world_size=world,
    )


def continued(loader, data, steps, **options):
    """Take some steps, and return a fresh loader that continues from there, and what the state says."""
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    result = opened(data, **options)
    result.load_state_dict(state)
    return result, state


@pytest.mark.parametrize(
    ("uneven", "shuffle", "workers"), [("pad", True, 0), ("join", False, 0), ("drop", True, 0), ("pad", True, 1)]
)
def test_two_resumes_in_a_row_read_little(uneven, shuffle, workers):
    options = {"uneven": uneven, "shuffle": shuffle, "workers": workers}
    whole = opened(Counter(), **options)
    expected = [batches(whole), batches(whole)]
    loader, state = continued(opened(Counter(), **options), Counter(), 110, **options)
    assert state["anchor"][0] == (900 if shuffle else 1024)
    loader, state = continued(loader, Counter(), 2, **options)  # within the same interval
    assert state["anchor"][0] == (900 if shuffle else 1024)
    data = Counter()
    loader, state = continued(loader, data, 38, **{**options, "workers": 0})
    assert state["anchor"][0] == (1500 if shuffle else 1536)
    same(batches(loader), expected[0][150:])
    if not workers:
        assert data.reads == SIZE - state["anchor"][0]
    same(batches(loader), expected[1])


def test_a_resume_in_a_later_epoch_continues_that_epoch():
    whole = opened(Counter())
    expected = [batches(whole), batches(whole), batches(whole)]
    loader = opened(Counter())
    batches(loader)
    loader, state = continued(loader, Counter(), 120)
    assert (state["epoch"], state["anchor"][0]) == (1, 900)
    same(batches(loader), expected[1][120:])
    same(batches(loader), expected[2])


@pytest.mark.parametrize("uneven", ["pad", "join"])
def test_another_number_of_ranks_continues_the_stream(uneven):
    expected = batches(opened(Counter(), uneven=uneven))
    _, state = continued(opened(Counter(), uneven=uneven), Counter(), 100)
    loaders = [opened(Counter(), uneven=uneven, rank=rank, world=2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
    joined = []
    for step in zip(*loaders, strict=True):
        joined.append(torch.cat([batch["n"] for batch in step]))
    full = expected[100:-1]
    same([batch.double() for batch in joined[:-1]], [batch[:12] for batch in full])
    assert joined[-1][: SIZE % 12].tolist() == expected[-1][: SIZE % 12].tolist()


def test_a_stream_without_state_is_read_from_its_beginning():
    expected, data = batches(opened(Plain())), Plain()
    loader, state = continued(opened(Plain()), data, 100)
    assert "anchor" not in state
    same(batches(loader), expected[100:])
    assert data.reads == SIZE


def test_each_sample_comes_once_and_is_shuffled():
    numbers = torch.cat([batch["n"] for batch in opened(Counter(), uneven="join")]).tolist()
    assert sorted(numbers) == list(range(SIZE))
    moved = sum(abs(number - at) for at, number in enumerate(numbers)) / SIZE
    assert 10 < moved < 30  # a third of the buffer on average


def test_a_state_that_is_no_json_is_not_kept():
    data = Counter()
    data.state_dict = lambda: {"at": torch.tensor(3)}
    expected = batches(opened(Counter()))
    again = Counter()
    loader, state = continued(opened(data), again, 100)
    assert "anchor" not in state
    same(batches(loader), expected[100:])
