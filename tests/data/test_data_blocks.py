"""Blocks of rows as whole batches: each row once for any blocks, ranks and batch size, stopped anywhere or not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import DataError
from echelon.data import Loader
from echelon.data.blocks import ColumnBlock


class Numbered:
    """Rows 0, 1, 2, ... in blocks of the given sizes; those in ``lost`` hold nothing."""

    def __init__(self, sizes, in_order=1, lost=()):
        self.block_rows, self.lost, self.fetched = sizes, np.array(sorted(lost), int), []
        self.runs = [range(n, min(n + in_order, len(sizes))) for n in range(0, len(sizes), in_order)]
        self._starts = np.cumsum([0, *sizes])

    def reader(self):
        return self

    def fetch(self, number):
        self.fetched.append(number)
        return number

    def columns(self, fetched):
        rows = np.arange(self._starts[fetched], self._starts[fetched + 1])
        whole = ~np.isin(rows, self.lost)
        return ColumnBlock([torch.from_numpy(rows), torch.from_numpy(rows * 10)], None if whole.all() else whole)


def epoch(data, rank=0, ranks=1, stop=None, state=None, **options):
    """(share, rows) of each batch; with ``stop``, those of the first batches and the state after them."""
    shares, seen = [], []
    loader = Loader(data, rank=rank, world_size=ranks, on_share=shares.append, **options)
    if state is not None:
        loader.load_state_dict(state)
    for rows, tens in loader:
        assert torch.equal(rows * 10, tens)
        seen.append((shares[-1], rows.tolist()))
        if len(seen) == stop:
            return seen, loader.state_dict()
    return seen


layouts = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=12),
        "in_order": st.integers(1, 3),
        "ranks": st.integers(1, 4),
        "batch_size": st.integers(1, 7),
        "shuffle": st.booleans(),
        "workers": st.sampled_from([0, 2]),
    }
)


@settings(max_examples=80)
@given(layouts, st.sampled_from(["join", "pad", "drop"]), st.integers(1, 20))
def test_each_row_once_and_stopping_changes_nothing(layout, uneven, stop):
    data = Numbered(layout.pop("sizes"), layout.pop("in_order"))
    ranks, total = layout.pop("ranks"), sum(data.block_rows)
    if total < ranks or (uneven == "drop" and total < ranks * layout["batch_size"]):
        with pytest.raises(DataError):
            epoch(data, 0, ranks, uneven=uneven, **layout)
        return
    taken = [epoch(data, rank, ranks, uneven=uneven, **layout) for rank in range(ranks)]
    counted = [row for batches in taken for share, rows in batches for row in rows[:share]]
    steps = len(Loader(data, world_size=ranks, uneven=uneven, **layout))
    assert {len(batches) for batches in taken} == {steps}
    if uneven == "join":
        assert sorted(counted) == list(range(total))
    elif uneven == "pad":
        assert sorted(set(counted)) == list(range(total))
        assert all(len({share for share, _ in step}) == 1 for step in zip(*taken, strict=True))
    else:
        assert len(set(counted)) == len(counted) == steps * ranks * layout["batch_size"]
    if stop < steps:
        for rank in range(ranks):
            before, state = epoch(data, rank, ranks, stop, uneven=uneven, **layout)
            assert before + epoch(data, rank, ranks, state=state, uneven=uneven, **layout) == taken[rank]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_that_hold_nothing_make_batches_shorter(ranks, shuffle):
    lost = {0, 7, 8, 30, 31, 32, 49}
    data = Numbered([10] * 5, lost=lost)
    taken = [epoch(data, rank, ranks, batch_size=8, shuffle=shuffle, uneven="join") for rank in range(ranks)]
    assert sorted(row for batches in taken for share, rows in batches for row in rows[:share]) == sorted(
        set(range(50)) - lost
    )


def test_a_batch_without_a_row_is_an_error():
    with pytest.raises(DataError, match="4 consecutive rows, a whole batch, cannot be read"):
        epoch(Numbered([10, 10], lost=range(4, 12)), batch_size=4, shuffle=False)


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (0, 2), (3, 4)])
def test_only_a_few_blocks_are_ever_held(workers, prefetch):
    data = Numbered([10] * 50)
    most = 0
    for step, _ in enumerate(Loader(data, batch_size=10, shuffle=False, workers=workers, prefetch=prefetch)):
        most = max(most, len(data.fetched) - step)
    assert most <= 1 + max(1, workers) + prefetch
    assert data.fetched == list(range(50)), "in the order of the pass, each once"


def test_other_blocks_in_a_shuffled_epoch_are_refused():
    """They would be mixed in another way, so that rows were lost or seen twice."""
    _, state = epoch(Numbered([10] * 6), stop=2, batch_size=8)
    with pytest.raises(DataError, match="blocks=6, this loader has blocks=3"):
        epoch(Numbered([20] * 3), state=state, batch_size=8)
    seen, state = epoch(Numbered([10] * 6), stop=2, batch_size=8, shuffle=False)
    rest = epoch(Numbered([20] * 3), state=state, batch_size=8, shuffle=False)
    assert [row for _, rows in seen + rest for row in rows] == list(range(60))
