"""The input parameters do what they say."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from benchmarks.zoo.input_images import measure_input
from echelon.base.errors import DataError, UsageError
from echelon.data import CtrFiles, FileList, Loader, Repeated, RepeatedStream
from echelon.data.loader import OPTIONS
from echelon.zoo.entry import Data, Request
from echelon.zoo.train.input import InputWaitTimer, loader_options, train_part

TENSORS = TensorDataset(torch.arange(10), torch.arange(10) * 2)


class Costly:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, 2 * index


class Whole(Costly):
    def batch(self, indices, seeds):
        return [torch.from_numpy(indices), torch.from_numpy(2 * indices)]


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def asked(**values):
    return Request(values, "classify_images")


@pytest.mark.parametrize(
    ("ranks", "values", "workers", "prefetch"),
    [
        (1, {}, 8, 4),  # 8 batches in work at once
        (1, {"num_parallel_batches": 32}, 16, 2),
        (4, {}, 4, 8),  # the threads are shared by the ranks of a host
        (64, {}, 1, 32),
        (1, {"num_parallel_batches": 2, "prefetch_buffer_size": 1}, 2, 1),
        (2, {"num_preprocessing_threads": 6}, 3, 10),
        (1, {"num_preprocessing_threads": 400, "num_parallel_batches": 400}, 16, 2),  # no more than there are cores
    ],
)
def test_threads_and_batches_become_workers_and_read_ahead(sixteen_cores, ranks, values, workers, prefetch):
    options = loader_options(asked(**values), Data(train=Costly()), ranks)
    assert (options["workers"], options["prefetch"]) == (workers, prefetch)


@pytest.mark.parametrize(
    "train", [TENSORS, TENSORS.tensors, Repeated(TENSORS, 99), Whole(), Repeated(Whole(), 99), Stream(3)]
)
def test_data_in_memory_or_read_by_every_worker_has_no_workers(sixteen_cores, train):
    """Data in memory, and data that every worker would read in full, get no workers."""
    assert loader_options(asked(), Data(train=train), 1)["workers"] == 0


def test_shuffle_buffer_is_passed_on_and_data_set_options_win():
    """The size of the shuffle buffer is passed on, and the data set's own options have priority."""
    data = Data(train=Costly(), loader={"workers": 0, "collate": len})
    options = loader_options(asked(shuffle_buffer_size=77), data, 1)
    assert options["shuffle_buffer"] == 77
    assert (options["workers"], options["collate"]) == (0, len)
    assert set(options) <= set(OPTIONS)


@pytest.mark.parametrize("name", ["num_preprocessing_threads", "num_parallel_batches", "prefetch_buffer_size"])
def test_nothing_can_be_done_with_no_threads(name):
    with pytest.raises(UsageError, match=f"^--{name} 0: must be 1 or more$"):
        loader_options(asked(**{name: 0}), Data(train=Costly()), 1)


def seen(dataset, **options):
    return [row for batch in Loader(dataset, batch_size=4, shuffle=False, **options) for row in batch[0].tolist()]


@pytest.mark.parametrize("train", [TENSORS, TENSORS.tensors, Costly(), Whole()])
def test_an_epoch_has_as_many_samples_as_are_asked_for(train):
    def part(size):
        return train_part(asked(num_sample_per_epoch=size), Data(train=train))

    assert seen(part(25)) == [*range(10), *range(10), *range(5)]
    assert seen(part(5)) == [0, 2, 4, 6, 8]  # evenly: a data set is often sorted by class
    assert seen(part(4)) == [0, 2, 5, 7]
    assert seen(part(None)) == seen(part(10)) == list(range(10))
    assert part(25)[13] == (3, 6)


def test_repeated_tensors_and_samples_are_shuffled_alike():
    """A repeated data set is shuffled in the same way as tensors and sample by sample."""
    images, labels = torch.randn(10, 3), torch.arange(10)
    whole = Loader(Repeated(TensorDataset(images, labels), 23), batch_size=4, seed=5)
    singly = Loader(Repeated(list(zip(images, labels, strict=True)), 23), batch_size=4, seed=5)
    for (a, b), (c, d) in zip(whole, singly, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.parametrize(("there", "size"), [(10, 4), (3, 8), (5, 5)])
def test_a_stream_is_cut_or_begun_again(there, size):
    part = train_part(asked(num_sample_per_epoch=size), Data(train=Stream(there)))
    assert isinstance(part, RepeatedStream)
    assert list(part) == [number % there for number in range(size)]
    assert len(Loader(part, batch_size=2)) == -(-size // 2)


def test_sizes_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(UsageError, match="num_sample_per_epoch 0"):
        train_part(asked(num_sample_per_epoch=0), Data(train=TENSORS))
    with pytest.raises(DataError, match="empty"):
        list(RepeatedStream(Stream(0), 3))
    (tmp_path / "a.csv").write_text("label,city\n1,Rome\n")
    for dealt in (
        FileList(str(tmp_path / "*.csv"), open),
        CtrFiles(str(tmp_path / "a.csv"), format="csv", categorical=["city"]),
    ):
        with pytest.raises(UsageError, match="leave it out, and use --stop_at_step"):
            train_part(asked(num_sample_per_epoch=5), Data(train=dealt))


class SlowSamples:
    """Each takes as long as it says, by a clock that it moves itself."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.clock[0] += self.seconds
        return index, index


def test_waiting_is_the_part_of_the_time_that_batches_take(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    loader, waiting = Loader(SlowSamples(clock, 0.1), batch_size=4), InputWaitTimer()
    for _ in range(2):
        for _ in waiting.around(loader):
            clock[0] += 1.2
    # 20 steps of 1.2 s, and 19 times 0.4 s: the first batch of all does not count
    assert waiting.share == pytest.approx(19 * 0.4 / (19 * 0.4 + 20 * 1.2))
    assert waiting.line(5.0, "images") == "input: 10 images/s possible (no workers), waited 24.1% of the time"


def test_input_is_measured_from_the_second_batch_on(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    measured = measure_input(Loader(SlowSamples(clock, 0.25), batch_size=4), seconds=15.0)
    assert (measured.examples, measured.seconds) == (60, pytest.approx(15.0))
    assert measured.rate == pytest.approx(4.0)


def test_workers_say_how_long_they_worked():
    loader = Loader(Costly(), batch_size=5, workers=1)
    assert loader.possible_rate is None
    batches = list(loader)
    assert np.sort(torch.cat([batch[0] for batch in batches]).numpy()).tolist() == list(range(10))
    assert loader.possible_rate is not None
    assert loader.possible_rate > 0
