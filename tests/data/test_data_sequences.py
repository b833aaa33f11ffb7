"""Sequences of different length: padded batches, and buckets that need little padding."""

from collections import namedtuple
from itertools import chain

import numpy as np
import pytest
import torch

from echelon.data import Loader, pad_collate

GENERATOR = np.random.RandomState(0)
LENGTHS = GENERATOR.randint(1, 100, size=500).tolist()
SENTENCES = [{"tokens": torch.full((n,), at), "at": at} for at, n in enumerate(LENGTHS)]


class Stream:
    def __iter__(self):
        return iter(SENTENCES)


def length(sentence):
    return len(sentence["tokens"])


def steps(world_size=1, global_batch=16, dataset=SENTENCES, **options):
    """The samples of every step, over all ranks."""
    loaders = [
        Loader(dataset, batch_size=global_batch // world_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    return [[batch["at"].tolist() for batch in step] for step in zip(*loaders, strict=True)]


def waste(**options):
    loader = Loader(SENTENCES, batch_size=16, lengths=LENGTHS, **options)
    for _ in loader:
        pass
    return loader.padding_waste


def test_buckets_waste_little_and_more_so_in_larger_windows():
    unsorted, small, large = waste(bucket_window=1), waste(bucket_window=4), waste(bucket_window=64)
    assert unsorted > 0.4
    assert large < small < unsorted
    assert large < 0.08


def test_the_waste_is_that_of_the_batches_handed_out():
    loader = Loader(SENTENCES, batch_size=16, lengths=length)
    batches = list(loader)
    room = sum(batch["tokens"].numel() for batch in batches)
    assert loader.padding_waste == pytest.approx(1 - sum(LENGTHS) / room)


@pytest.mark.parametrize("dataset", [SENTENCES, Stream()], ids=["map", "stream"])
def test_a_step_has_the_same_samples_for_any_number_of_ranks(dataset):
    alone = [step[0] for step in steps(1, dataset=dataset, lengths=length, bucket_window=4, uneven="join")]
    assert sorted(chain(*alone)) == list(range(500))
    for ranks in (2, 4):
        together = steps(ranks, dataset=dataset, lengths=length, bucket_window=4, uneven="join")
        assert [sorted(chain(*step)) for step in together] == [sorted(step) for step in alone]


def test_ranks_of_one_step_hold_like_lengths():
    for step in steps(4, lengths=LENGTHS)[:-1]:
        longest = [max(LENGTHS[at] for at in share) for share in step]
        assert max(longest) - min(longest) <= 6


def test_buckets_are_visited_in_no_order_of_length():
    longest = [max(LENGTHS[at] for at in step[0]) for step in steps(lengths=LENGTHS)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_lengths_may_be_a_list_a_function_or_an_array():
    assert steps(lengths=LENGTHS) == steps(lengths=length) == steps(lengths=np.array(LENGTHS))
    assert steps(lengths=length, workers=2) == steps(lengths=length)


def test_waste_is_counted_with_workers_too():
    assert waste(workers=2) == waste()


def test_drop_does_not_always_drop_the_longest():
    dropped = set()
    loader = Loader(SENTENCES, batch_size=16, lengths=LENGTHS, uneven="drop")
    for _ in loader.epochs(6):
        dropped |= set(range(500)) - {at for batch in loader for at in batch["at"].tolist()}
    assert min(LENGTHS[at] for at in dropped) < 50 < max(LENGTHS[at] for at in dropped)


def test_pad_collate_fills_up_what_differs_and_stacks_the_rest():
    samples = [
        {"tokens": [1, 2, 3], "vector": torch.ones(2), "frames": np.ones((1, 2), np.float32), "name": "a", "y": 1},
        {"tokens": [4], "vector": torch.zeros(2), "frames": np.ones((2, 2), np.float32), "name": "b", "y": 0},
    ]
    batch = pad_collate(samples)
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["vector"].tolist() == [[1, 1], [0, 0]]
    assert batch["frames"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    assert batch["name"] == ["a", "b"]
    assert batch["y"].tolist() == [1, 0]


def test_pad_values_may_be_given_for_each_field():
    Pair = namedtuple("Pair", "tokens labels")
    tuples = [(torch.tensor([1, 2]), torch.tensor([1, 2])), (torch.tensor([3]), torch.tensor([3]))]
    expected = [[[1, 2], [3, 9]], [[1, 2], [3, -100]]]
    assert [field.tolist() for field in pad_collate(tuples, (9, -100))] == expected
    named = pad_collate([Pair(*sample) for sample in tuples], (9, -100))
    assert named.labels.tolist() == expected[1]
    dicts = [{"tokens": tokens, "labels": labels} for tokens, labels in tuples]
    assert pad_collate(dicts, {"tokens": 9, "labels": -100})["labels"].tolist() == expected[1]
    loader = Loader(dicts, batch_size=2, lengths=[2, 1], pad_value={"tokens": 9, "labels": -100}, shuffle=False)
    assert next(iter(loader))["tokens"].tolist() == [[3, 9], [1, 2]], "sorted by length"


class Cropped:
    """Sequences whose length is drawn anew at every reading."""

    def __len__(self):
        return 64

    def __getitem__(self, at):
        return {"tokens": torch.zeros(int(torch.randint(1, 50, ()))), "at": at}


def test_ranks_measure_alike_even_where_lengths_are_random():
    alone = [sorted(step[0]) for step in steps(1, dataset=Cropped(), lengths=length)]
    torch.rand(7)  # other ranks may have drawn other numbers before
    assert [sorted(chain(*step)) for step in steps(4, dataset=Cropped(), lengths=length)] == alone
