"""Files of unequal size, read by real ranks that know only their own: all stop together, under each policy."""

import json
import random

import pytest
import torch
from harness import errors, run

import echelon
from echelon.base.errors import DataError
from echelon.data import FileList, Loader

SIZES = (11, 3, 8, 2, 5)  # 29 samples; file f holds f * 100, f * 100 + 1, ...
ALL = sorted(100 * file + line for file, size in enumerate(SIZES) for line in range(size))


def read_lines(path):
    with open(path) as file:
        for line in file:
            yield int(line), random.random()


@pytest.fixture
def folder(tmp_path):
    for file, size in enumerate(SIZES):
        (tmp_path / f"{file}.txt").write_text("".join(f"{100 * file + line}\n" for line in range(size)))
    return tmp_path


def make_loader(folder, shares, **options):
    world = echelon.init()
    return Loader(
        FileList(f"{folder}/*.txt", read_lines),
        batch_size=4,
        rank=world.rank,
        world_size=world.size,
        group=world.control,
        on_share=shares.append,
        **options,
    )


def read_all(folder, epochs=1, state=None, stop_after=None, **options):
    """Every (share, samples) this rank was given; with ``stop_after``, the state at that batch too."""
    shares = []
    loader = make_loader(folder, shares, **options)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for _ in loader.epochs(epochs):
        for numbers, noise in loader:
            seen.append((shares[-1], numbers.tolist(), noise.tolist()))
            if len(seen) == stop_after:
                return seen, json.loads(json.dumps(loader.state_dict()))
    return seen


def samples(rank, counted_only=True):
    return [n for share, numbers, _ in rank for n in (numbers[:share] if counted_only else numbers)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_pad_gives_both_ranks_equal_batches_until_both_are_done(folder, shuffle):
    first, second = run(read_all, folder, shuffle=shuffle)
    assert [share for share, _, _ in first] == [share for share, _, _ in second]
    assert sorted(set(samples(first) + samples(second))) == ALL
    assert not set(samples(first)) & set(samples(second)), "a rank pads with its own samples"
    if not shuffle:
        assert len(first) == len(second) == 6, "rank 0 has 24 samples, rank 1 has 5"
        assert len(samples(second)) == 24


def test_join_counts_every_sample_once(folder):
    first, second = run(read_all, folder, uneven="join", shuffle=False)
    assert sorted(samples(first) + samples(second)) == ALL
    assert [share for share, _, _ in first] == [4, 4, 4, 4, 4, 4]
    assert [share for share, _, _ in second] == [4, 1, 0, 0, 0, 0]
    assert second[1] == (1, *second[2][1:]), "the stand-in is the rank's last batch"


def test_drop_stops_both_at_the_first_that_has_no_full_batch(folder):
    first, second = run(read_all, folder, uneven="drop", shuffle=False)
    assert [share for share, _, _ in first] == [share for share, _, _ in second] == [4]


def test_files_are_dealt_anew_in_every_epoch(folder):
    first, second = run(read_all, folder, epochs=4, uneven="join")
    for epoch_files in zip(*(files_by_epoch(rank) for rank in (first, second)), strict=True):
        assert sorted(epoch_files[0] | epoch_files[1]) == list(range(len(SIZES)))
    assert len({frozenset(files) for files in files_by_epoch(first)}) > 1


def files_by_epoch(rank):
    """A rank's files in each epoch; an epoch is over when a file's sample comes for the second time."""
    epochs, seen = [set()], set()
    for number in samples(rank):
        if number in seen:
            epochs.append(set())
            seen = set()
        seen.add(number)
        epochs[-1].add(number // 100)
    return epochs


@pytest.mark.parametrize("uneven", ["pad", "join"])
def test_a_stopped_run_goes_on_exactly(folder, uneven):
    whole = run(read_all, folder, epochs=2, uneven=uneven)
    stop = min(len(rank) for rank in whole) // 2 - 1  # near the end of the first epoch, one rank having run out
    parts = run(read_all, folder, epochs=2, uneven=uneven, stop_after=stop)
    states = [state for _, state in parts]
    assert states[0] == states[1]
    rest = run(read_all, folder, epochs=2, uneven=uneven, state=states[0])
    assert [seen + after for (seen, _), after in zip(parts, rest, strict=True)] == whole


def test_other_world_size_may_begin_but_not_continue_an_epoch(folder):
    (_, state), _ = run(read_all, folder, stop_after=1)
    line = errors(read_all, folder, ranks=3, state=state)
    assert (
        line
        == [
            "DataError: the state is from the middle of epoch 0 with world_size=2, this loader has world_size=3 and "
            "would go through other samples; use world_size=2 until that epoch is done"
        ]
        * 3
    )
    at_the_start = {**state, "samples": 0, "position": 0, "epoch": 5}
    ranks = run(read_all, folder, ranks=3, state=at_the_start, epochs=6, uneven="join")
    assert sorted(number for rank in ranks for number in samples(rank)) == ALL


def test_fewer_files_than_ranks_is_an_error_on_every_rank():
    for rank in range(3):
        with pytest.raises(DataError, match="2 files for 3 ranks: every rank needs a file of its own"):
            Loader(FileList(["a", "b"], read_lines), batch_size=4, rank=rank, world_size=3)


def test_ranks_without_a_group_cannot_agree():
    with pytest.raises(DataError, match="2 ranks that read files of their own must agree"):
        Loader(FileList(["a", "b"], read_lines), batch_size=4, world_size=2)


def test_a_pattern_without_files_names_itself(tmp_path):
    with pytest.raises(DataError, match=r"no file matches '.*nothing\*.txt'"):
        FileList(tmp_path / "nothing*.txt", read_lines)


def test_a_rank_that_finds_nothing_stops_all_with_its_name(folder):
    for file in (1, 3):
        (folder / f"{file}.txt").write_text("")
    lines = errors(read_all, folder, shuffle=False)
    assert lines[0] == "PeerLost: rank 1 could not read its data, so all ranks stop; its own log says why"
    assert lines[1].startswith("DataError: rank 1 found no sample in its part of the data")


def take_steps_together(folder):
    """Each batch is followed by a collective, as in training; returns how many steps came before the error."""
    world, steps = echelon.init(), 0
    try:
        for _ in make_loader(folder, [], shuffle=False):
            torch.distributed.all_reduce(torch.ones(1), group=world.control)
            steps += 1
    except Exception as error:
        return steps, type(error).__name__, str(error)


def test_unreadable_file_ends_all_ranks_at_the_same_step(folder):
    (folder / "2.txt").write_text("200\n201\nthree\n")
    first, second = run(take_steps_together, folder)
    assert first == (3, "ValueError", "invalid literal for int() with base 10: 'three\\n'")
    assert second == (3, "PeerLost", "rank 0 could not read its data, so all ranks stop; its own log says why")


def test_drop_with_less_than_a_batch_is_an_error(folder):
    lines = errors(read_all, folder, ranks=4, uneven="drop", shuffle=False)
    expected = "one rank's part of the data holds 2 samples and not 4; use a smaller batch_size or uneven='pad'"
    assert all(line.startswith("DataError: uneven='drop'") and line.endswith(expected) for line in lines)


class Halves:
    """Any data set that knows how to split itself."""

    def shard(self, index, count):
        return (torch.tensor(n) for n in range(index, 10, count))


class OtherLibrarys(list):
    """A map-style data set whose ``shard`` means something else."""

    def shard(self, num_shards, index):
        raise AssertionError("not to be called")


def test_any_data_set_with_shard_is_read_in_parts():
    assert [batch.tolist() for batch in Loader(Halves(), batch_size=4, shuffle=False)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert sum(1 for _ in Loader(OtherLibrarys(range(10)), batch_size=4)) == 3
