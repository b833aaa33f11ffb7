"""A loader that was stopped goes on with exactly the batches that were left."""

import json
from pathlib import Path

import pytest
import torch
from test_data_order import Counting, Squares, numbers
from torch.utils.data import Subset, TensorDataset

from echelon.base.errors import DataError
from echelon.data import FileList, Loader

SENTENCES = [torch.full((1 + n * 7 % 13,), n) for n in range(50)]
CASES = {
    "map": (Squares(50), {}),
    "tensors": ((torch.arange(50),), {}),
    "stream": (Counting(50), {"shuffle_buffer": 8}),
    "stream in order": (Counting(50), {"shuffle": False}),
    "bucketed": (SENTENCES, {"lengths": len, "bucket_window": 2}),
    "bucketed stream": (Counting(50), {"lengths": lambda s: s["n"] % 5 + 1, "bucket_window": 2}),
}


def contents(batch):
    if isinstance(batch, torch.Tensor):
        return [row[0].item() for row in batch]  # a sentence is its number, repeated
    return numbers(batch)


def whole_run(make, epochs):
    loader = make()
    return [contents(batch) for _ in loader.epochs(epochs) for batch in loader]


def stopped_run(make, epochs, stop_after):
    """The same, stopped after so many batches and gone on with in a new loader."""
    seen, loader = [], make()
    for _ in loader.epochs(epochs):
        for batch in loader:
            seen.append(contents(batch))
            if len(seen) == stop_after:
                state = json.loads(json.dumps(loader.state_dict()))
                again = make()
                again.load_state_dict(state)
                assert (again.epoch, again.position) == (loader.epoch, loader.position)
                return seen + [contents(b) for _ in again.epochs(epochs) for b in again]
    raise AssertionError("never stopped")


@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_sees_what_an_unbroken_one_sees(case, uneven):
    dataset, options = CASES[case]
    for rank in range(3):

        def make(rank=rank):
            return Loader(dataset, batch_size=4, rank=rank, world_size=3, seed=3, uneven=uneven, **options)

        expected = whole_run(make, epochs=2)
        for stop_after in range(1, len(expected) + 1):
            assert stopped_run(make, 2, stop_after) == expected, f"rank {rank}, stopped after {stop_after}"


@pytest.mark.parametrize("case", ["map", "stream", "bucketed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_with_workers_too(case, workers):
    dataset, options = CASES[case]

    def make():
        return Loader(dataset, batch_size=4, workers=workers, **options)

    assert stopped_run(make, 2, 5) == whole_run(lambda: Loader(dataset, batch_size=4, **options), 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("after", [(2, 4), (1, 5), (3, 3), (4, 8)])
def test_other_ranks_and_batch_sizes_go_on_at_the_sample(case, after):
    """(1 rank x 8) then (ranks x batch size): nothing lost, nothing twice, in that epoch and the next."""
    dataset, options = CASES[case]
    before, seen = Loader(dataset, batch_size=8, seed=5, uneven="join", **options), []
    for batch in before:
        seen += contents(batch)
        if before.position == 3:
            break
    ranks, batch_size = after
    next_epoch = []
    for rank in range(ranks):
        shares = []
        loader = Loader(
            dataset,
            batch_size=batch_size,
            rank=rank,
            world_size=ranks,
            seed=5,
            uneven="join",
            on_share=shares.append,
            **options,
        )
        loader.load_state_dict(before.state_dict())
        for epoch in loader.epochs(2):
            for batch in loader:
                (seen if epoch == 0 else next_epoch).extend(contents(batch)[: shares[-1]])
    assert sorted(seen) == sorted(next_epoch) == list(range(50))


def test_an_equal_global_batch_continues_step_by_step():
    before = Loader(Squares(50), batch_size=8)
    steps = iter(before)
    next(steps), next(steps)
    shares = []
    for rank in range(2):
        loader = Loader(Squares(50), batch_size=4, rank=rank, world_size=2)
        loader.load_state_dict(before.state_dict())
        assert loader.position == 2
        shares.append([numbers(batch) for batch in loader])
    assert [a + b for a, b in zip(*shares, strict=True)] == [numbers(batch) for batch in steps]


def test_a_state_from_the_last_batch_has_an_empty_rest():
    loader = Loader(Squares(8), batch_size=4)
    batches = iter(loader)
    next(batches), next(batches)
    again = Loader(Squares(8), batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert [(epoch, len(list(again))) for epoch in again.epochs(2)] == [(0, 0), (1, 2)]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seed": 1}, "epoch 0 with seed=0, this loader has seed=1"),
        ({"shuffle": False}, "shuffle=True, this loader has shuffle=False"),
        ({"dataset": Squares(21)}, "epoch 0: it was 20 samples, and it is 21 samples; use the same data"),
    ],
)
def test_state_of_another_order_is_refused_only_mid_epoch(options, line):
    """A state of another order is refused in the middle of an epoch and accepted at its start."""
    loader = Loader(Squares(20), batch_size=4)
    at_start = loader.state_dict()
    next(iter(loader))
    other = Loader(**{"dataset": Squares(20), "batch_size": 4, **options})
    with pytest.raises(DataError, match=line):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(at_start)
    assert other.epoch == 0


def moved_files(directory, texts):
    directory.mkdir()
    for name, text in texts.items():
        (directory / name).write_text(text)
    return FileList(str(directory / "*.txt"), lambda path: Path(path).read_text().split())


def test_changed_contents_or_files_are_refused_only_mid_epoch(tmp_path):
    """Moved files are the same data. A file with other text, another name or a subset of other samples is not."""
    texts = {"a.txt": "0 1 2", "b.txt": "3 4 5"}
    rows = torch.arange(20)
    cases = [
        ((rows,), [(rows.clone(),)], [(rows + 1,)]),
        (Subset(Squares(40), range(20)), [], []),  # user code reads it: only its size is known
        (Subset(TensorDataset(rows), range(9)), [Subset(TensorDataset(rows), range(9))], [
            Subset(TensorDataset(rows), range(1, 10))
        ]),
        (moved_files(tmp_path / "here", texts), [moved_files(tmp_path / "there", texts)], [
            moved_files(tmp_path / "text", texts | {"b.txt": "3 4 6"}),
            moved_files(tmp_path / "name", {"a.txt": "0 1 2", "c.txt": "3 4 5"}),
            moved_files(tmp_path / "more", texts | {"c.txt": "6"}),
        ]),
    ]  # fmt: skip
    for dataset, same, others in cases:
        before = Loader(dataset, batch_size=4)
        at_start = json.loads(json.dumps(before.state_dict()))
        next(iter(before))
        state = json.loads(json.dumps(before.state_dict()))
        for good in [dataset, *same]:
            Loader(good, batch_size=4).load_state_dict(state)
        for bad in others:
            loader = Loader(bad, batch_size=4)
            with pytest.raises(DataError, match=r"has changed in the middle of epoch 0: it was .*checksum .* it is "):
                loader.load_state_dict(state)
            loader.load_state_dict(at_start)
            accepting = Loader(bad, batch_size=4, changed_data="accept")
            accepting.load_state_dict(state)
            assert (accepting.epoch, accepting.position) == (0, 1)


def test_accepted_data_of_another_size_begins_the_epoch_again():
    before = Loader(Squares(20), batch_size=4)
    batches = iter(before)
    next(batches)
    middle = before.state_dict()
    for _ in range(4):
        next(batches)
    longer = Loader(Squares(24), batch_size=4, changed_data="accept")
    longer.load_state_dict(middle)
    assert sorted(n for batch in longer for n in numbers(batch)) == list(range(24))
    at_end = Loader(Squares(24), batch_size=4)  # nothing was left of that epoch, so that nothing is refused
    at_end.load_state_dict(before.state_dict())
    assert [(epoch, len(list(at_end))) for epoch in at_end.epochs(2)] == [(0, 0), (1, 6)]


def test_two_loops_at_once_are_refused():
    loader = Loader(Squares(20), batch_size=4)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(DataError, match="use one loader for each loop"):
        next(first)
