"""Worker processes, random augmentation and the cache change how long reading takes, never what is read."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from echelon.data import FileList, Loader


class Augmented:
    """Every sample draws from all three sources of randomness, and says how often it was read."""

    def __init__(self, size=24):
        self.size, self.reads = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads += 1
        return index, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


class AugmentedStream(IterableDataset):
    """A stream written for torch's DataLoader: it would split itself among the workers it sees."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, 26, step):
            yield index, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def three_lines(path):
    return [(int(path) * 10 + line, torch.rand(3)) for line in range(3)]


DATA = {
    "map": Augmented(26),
    "stream": AugmentedStream(),
    "tensors": (torch.arange(26), torch.arange(26)),
    "files": FileList([str(n) for n in range(7)], three_lines),
}


def read(dataset, epochs=2, **options):
    loader = Loader(dataset, **{"batch_size": 4, "seed": 11, **options})
    return [
        (index, tuple(numbers.tolist()) if numbers.ndim else numbers.item())
        for _ in loader.epochs(epochs)
        for indices, values in loader
        for index, numbers in zip(indices.tolist(), values, strict=True)
    ]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
def test_workers_give_the_same_batches_in_the_same_order(kind, uneven):
    alone = read(DATA[kind], uneven=uneven)
    assert len(alone) >= 2 * (20 if uneven == "drop" else 21)
    for workers in (1, 2):
        assert read(DATA[kind], uneven=uneven, workers=workers) == alone


def test_workers_begin_cleanly_after_an_epoch_left_early():
    """Workers begin the next epoch cleanly after one that was left early."""

    def run(workers):
        loader, seen = Loader(DATA["stream"], batch_size=4, workers=workers), []
        for epoch in loader.epochs(3):
            for batch in loader:
                seen.append((epoch, batch[0].tolist()))
                if epoch == 0:
                    break
        return seen

    assert run(2) == run(0)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_augmentation_is_the_same_for_any_number_of_ranks(kind):
    alone = sorted(read(DATA[kind], uneven="drop", batch_size=12))
    halves = [read(DATA[kind], uneven="drop", batch_size=6, rank=r, world_size=2) for r in range(2)]
    assert sorted(halves[0] + halves[1]) == alone


def test_augmentation_differs_by_epoch_and_by_sample():
    """Augmentation is drawn anew in every epoch and is different for every sample."""
    drawn = [values for _, values in read(Augmented(24), epochs=2)]
    assert len({value for values in drawn for value in values}) == 24 * 2 * 3


def test_augmentation_is_the_same_after_a_resume():
    whole = Loader(Augmented(), batch_size=4)
    batches = iter(whole)
    next(batches), next(batches)
    again = Loader(Augmented(), batch_size=4)
    again.load_state_dict(whole.state_dict())
    for expected, got in zip(batches, again, strict=True):
        assert torch.equal(expected[1], got[1])


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("workers", [0, 1])
def test_reading_data_does_not_disturb_the_models_randomness(kind, workers):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()

    def seeded():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return draw()

    seeded()
    expected = [draw() for _ in range(6)]
    seeded()
    assert [draw() for _ in Loader(DATA[kind], batch_size=4, workers=workers)][:5] == expected[:5]


def test_a_collate_function_may_be_random_too():
    def masked(samples):
        return torch.tensor([index for index, _ in samples]) * (torch.rand(len(samples)) > 0.3)

    def run(**options):
        loader = Loader(DATA["map"], batch_size=4, collate=masked, **options)
        return [batch.tolist() for _ in loader.epochs(2) for batch in loader]

    assert run() == run(workers=2)


def test_the_cache_reads_every_sample_once_and_freezes_it():
    dataset = Augmented(24)
    first, second, third = (sorted(read_epoch) for read_epoch in thirds(read(dataset, epochs=3, cache=True)))
    assert dataset.reads == 24
    assert first == second == third


def thirds(samples):
    third = len(samples) // 3
    return samples[:third], samples[third : 2 * third], samples[2 * third :]


@pytest.mark.parametrize("kind", DATA)
def test_cached_samples_do_not_depend_on_workers_or_epoch(kind):
    """The samples that the cache keeps depend neither on workers nor on the epoch in which they were read."""
    alone = read(DATA[kind], epochs=3, cache=True)
    assert read(DATA[kind], epochs=3, cache=True, workers=2) == alone
    later = Loader(DATA[kind], batch_size=4, seed=11, cache=True)
    later.load_state_dict({**later.state_dict(), "epoch": 2})
    frozen = dict(alone)
    assert all(
        frozen[index] == (tuple(value.tolist()) if value.ndim else value.item())
        for indices, values in later
        for index, value in zip(indices.tolist(), values, strict=True)
    )


def test_a_cached_stream_left_early_is_not_taken_for_whole():
    loader = Loader(AugmentedStream(), batch_size=4, cache=True, shuffle=False)
    next(iter(loader))
    assert sum(len(indices) for indices, _ in loader) == 26
