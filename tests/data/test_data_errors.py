"""A user's mistake is one line: what was asked, what is so, what to do."""

import pytest
import torch
from test_data_order import Counting, Squares
from torch.utils.data import DataLoader

from echelon.base.errors import DataError, EchelonError, UsageError
from echelon.data import Loader


class NoDataSet:
    pass


class Broken(Squares):
    def __getitem__(self, index):
        raise OSError(f"disk error at {index}")


def odd_one_out(index, odd):
    samples = [{"x": torch.zeros(3)} for _ in range(8)]
    samples[index] = odd
    return samples


CASES = [
    ({"dataset": []}, DataError, "the data set is empty"),
    ({"dataset": Counting(0)}, DataError, "the data set is empty"),
    ({"dataset": Squares(2), "world_size": 3}, DataError, "2 samples for 3 ranks: every rank needs one"),
    ({"dataset": Counting(2), "world_size": 3}, DataError, "2 samples for 3 ranks: every rank needs one"),
    ({"dataset": Squares(9), "batch_size": 0}, DataError, "batch_size=0: a batch needs at least one sample"),
    (
        {"dataset": Squares(7), "world_size": 2, "uneven": "drop"},
        DataError,
        "uneven='drop' keeps full batches only, but 7 samples do not fill one of 8 (4 for each of 2 ranks)",
    ),
    ({"dataset": Counting(7), "world_size": 2, "uneven": "drop"}, DataError, "7 samples do not fill one of 8"),
    ({"dataset": Squares(9), "shufle": True}, UsageError, "no option 'shufle'; did you mean 'shuffle'?"),
    ({"dataset": Squares(9), "uneven": "dorp"}, UsageError, "uneven='dorp'): expected 'pad', 'drop' or 'join'"),
    ({"dataset": Squares(9), "batch_size": "4"}, UsageError, "batch_size='4'): expected int"),
    ({"dataset": Squares(9), "rank": 2, "world_size": 2}, UsageError, "rank=2 of world_size=2: ranks count from 0"),
    ({"dataset": Squares(9), "workers": -1}, UsageError, "workers=-1: must be 0 or more"),
    ({"dataset": Squares(9), "lengths": [1, 2]}, DataError, "lengths= has 2 entries for a data set of 9 samples"),
    ({"dataset": Counting(9), "lengths": [1] * 9}, DataError, "pass a function of a sample"),
    ({"dataset": (n for n in range(9))}, DataError, "a generator can be read only once"),
    ({"dataset": DataLoader([1, 2])}, UsageError, "pass its .dataset"),
    ({"dataset": NoDataSet()}, DataError, "NoDataSet is no data set: it needs __len__ and __getitem__"),
    ({"dataset": (torch.zeros(3), torch.zeros(4))}, DataError, "differ in length: [3, 4]"),
    (
        {"dataset": odd_one_out(5, {"x": torch.zeros(4)})},
        DataError,
        "sample 5 does not fit into one batch with sample",
    ),
    (
        {"dataset": odd_one_out(3, {"y": torch.zeros(3)})},
        DataError,
        "sample 3 does not fit into one batch with sample",
    ),
    ({"dataset": odd_one_out(2, NoDataSet())}, DataError, "sample 2 cannot become part of a batch"),
    (
        {"dataset": [torch.zeros(2, 3), torch.zeros(3, 4)], "batch_size": 2, "lengths": len},
        DataError,
        "shapes (2, 3) and (3, 4) differ beyond the first dimension",
    ),
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("options", "kind", "line"), CASES, ids=[case[2][:30] for case in CASES])
def test_mistakes_are_one_line(options, kind, line, workers):
    with pytest.raises(EchelonError) as caught:
        list(Loader(**{"batch_size": 4, "workers": workers, **options}))
    assert type(caught.value) is kind
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stream_length_is_unknown_but_list_works():
    """The length of a loader over a stream is unknown, but a list of its batches can be made."""
    loader = Loader(Counting(9), batch_size=4)
    with pytest.raises(EchelonError, match="the number of batches in Counting is not known before it is read"):
        len(loader)
    assert len(list(loader)) == 3


def test_data_set_error_keeps_its_type_and_names_the_sample():
    """An error that the data set raises keeps its type and has a note that names the sample."""
    with pytest.raises(OSError, match="disk error") as caught:
        list(Loader(Broken(9), batch_size=4, shuffle=False))
    assert caught.value.__notes__ == ["echelon: while reading sample 0"]


def test_reading_fails_and_a_new_loop_starts_cleanly():
    class Shaky(Counting):
        failed = False

        def __iter__(self):
            for n in range(10):
                if n == 6 and not self.failed:
                    self.failed = True
                    raise OSError("once")
                yield n

    loader = Loader(Shaky(10), batch_size=2, shuffle=False)
    with pytest.raises(OSError, match="once"):
        list(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
