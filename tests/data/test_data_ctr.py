"""Click logs in files: every value against a plain Python reader, every row once, and broken lines named."""

import csv
import gzip
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from echelon.base.errors import DataError, EchelonError, UsageError
from echelon.data import CtrFiles, Loader
from echelon.data.ctr.hashing import hash_texts, salt_of, text_id

NAMES = ["label", *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))]


def criteo_rows(count, seed=0):
    """Rows as lists of texts, gaps included. The first count is the number of the row."""
    draw = random.Random(seed)
    return [
        [
            str(draw.randrange(2)),
            str(row),
            *(draw.choice(["", "0", "-2", str(draw.randrange(10**7))]) for _ in range(12)),
            *(draw.choice(["", f"{draw.randrange(500):08x}", f"{draw.randrange(2**32):08x}"]) for _ in range(26)),
        ]
        for row in range(count)
    ]


def write_lines(path, rows, delimiter="\t", end="\n"):
    data = "".join(delimiter.join(row) + end for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def plain(rows):
    """Parse rows of Criteo's format value by value."""
    ids = [[text_id(text or None, salt_of(f"c{n + 1}")) for n, text in enumerate(row[14:])] for row in rows]
    dense = [
        [math.copysign(math.log1p(abs(float(text))), float(text)) if text else 0.0 for text in row[1:14]]
        for row in rows
    ]
    return np.array(ids, np.int64), np.array(dense, np.float32), np.array([float(row[0]) for row in rows], np.float32)


def read(dataset, **options):
    """All batches of an epoch, put together."""
    batches = list(Loader(dataset, **{"batch_size": 7, "shuffle": False, "uneven": "join", **options}))
    return [torch.cat(column).numpy() for column in zip(*batches, strict=True)]


def same(got, want):
    assert (got[0] == want[0]).all()
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert (got[2] == want[2]).all()


def row_numbers(dense):
    """The first count of each row, back from its logarithm."""
    return np.rint(np.expm1(np.asarray(dense, np.float64)[:, 0])).astype(int).tolist()


@pytest.mark.parametrize("name", ["day.tsv", "day.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_criteo_equals_a_plain_reader(tmp_path, name, end):
    rows = criteo_rows(300)
    dataset = CtrFiles(write_lines(tmp_path / name, rows, end=end), format="criteo", block_bytes=4000)
    assert len(dataset.block_rows) > 5
    got = read(dataset)
    assert [column.dtype for column in got] == [np.int64, np.float32, np.float32]
    same(got, plain(rows))


def test_the_three_formats_say_the_same(tmp_path):
    rows = criteo_rows(200)
    write_lines(tmp_path / "a.tsv", rows)
    write_lines(tmp_path / "a.csv.gz", [NAMES, *rows], delimiter=",")
    columns = {
        name: [(float(text) if text else None) if at < 14 else (text or None) for text in column]
        for at, (name, column) in enumerate(zip(NAMES, zip(*rows, strict=True), strict=True))
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=60)
    named = {"numeric": NAMES[1:14], "categorical": NAMES[14:]}
    tsv = read(CtrFiles(tmp_path / "a.tsv", format="criteo"))
    same(read(CtrFiles(tmp_path / "a.csv.gz", format="csv", **named)), tsv)
    same(read(CtrFiles(tmp_path / "a.parquet", format="parquet", **named)), tsv)


def test_whole_numbers_in_parquet_have_the_ids_of_their_text(tmp_path):
    table = pa.table({"y": [0, 1, 1], "n": pa.array([7, -3, None], pa.int64()), "b": [True, False, True]})
    parquet.write_table(table, tmp_path / "a.parquet")
    ids, dense, label = read(CtrFiles(tmp_path / "a.parquet", format="parquet", label="y", categorical=["n", "b"]))
    assert ids[:, 0].tolist() == [text_id(text, salt_of("n")) for text in ("7", "-3", None)]
    assert ids[:, 1].tolist() == [text_id(text, salt_of("b")) for text in ("true", "false", "true")]
    assert dense.shape == (3, 0)
    assert label.tolist() == [0, 1, 1]


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=40), st.text(max_size=20).map(str.encode)), max_size=30),
    st.integers(0, 2**64 - 1),
)
def test_the_kernel_equals_plain_python(values, salt):
    for kind in (pa.binary(), pa.large_binary()):
        array = pa.array([b"before", *values], kind).slice(1)  # one that does not begin at its buffers' beginning
        out = np.zeros((len(values), 3), np.int64)
        hash_texts(array, salt, out[:, 1])
        assert out[:, 1].tolist() == [text_id(value, salt) for value in values]
        assert not out[:, ::2].any()


def test_ids_never_change():
    """Trained tables hold these numbers."""
    salt = salt_of("city")
    assert salt == SALT
    assert [text_id(text, salt) for text in ("", None, "Rome", "a longer text than eight bytes")] == IDS
    assert text_id(" Rome\t", salt) == text_id("Rome", salt)
    assert text_id("Rome", salt_of("town")) != text_id("Rome", salt)
    assert text_id("Rome", salt_of("city", seed=1)) != text_id("Rome", salt)


SALT = 10030069276767827980
IDS = [3421759635560857205, -6476016476121668767, -3603485189451066556, 6251150713828941383]


def test_a_quoted_empty_text_is_not_a_missing_one(tmp_path):
    (tmp_path / "a.csv").write_text('label,x,word\n1,0.5,\n0,,""\n1,nan,"a,b"\n')
    dataset = CtrFiles(tmp_path / "a.csv", format="csv", numeric=["x"], categorical=["word"], transform="none", fill=-9)
    ids, dense, label = read(dataset)
    assert ids[:, 0].tolist() == [text_id(text, salt_of("word")) for text in (None, "", "a,b")]
    assert dense[:, 0].tolist() == [0.5, -9, -9]
    assert label.tolist() == [1, 0, 1]


def test_columns_share_ids_and_numbers_take_any_transform(tmp_path):
    (tmp_path / "a.csv").write_text("friend,n,user\nann,3,ann\nbob,-4,ann\n")
    shared = {"user": "person", "friend": "person"}
    dataset = CtrFiles(
        tmp_path / "a.csv", format="csv", label=None, numeric=["n"], categorical=shared, transform=lambda x: x * 10
    )
    ids, dense = read(dataset)
    assert ids[0, 0] == ids[0, 1] == ids[1, 0] != ids[1, 1]
    assert dense.tolist() == [[30], [-40]]
    assert dataset.slots == ["user", "friend"]


# -- ranks, order, going on ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """101 rows in three files, one of them gzip, in blocks of some five rows."""
    folder, rows = tmp_path_factory.mktemp("day"), criteo_rows(101)
    write_lines(folder / "0.tsv", rows[:40])
    write_lines(folder / "1.gz", rows[40:63])
    write_lines(folder / "2.tsv", rows[63:])
    return CtrFiles(f"{folder}/*", format="criteo", block_bytes=1200)


def loader(day, rank=0, ranks=1, **options):
    shares = []
    made = Loader(day, rank=rank, world_size=ranks, on_share=shares.append, **{"batch_size": 6, **options})
    return made, shares


def epoch(day, rank, ranks, **options):
    """For each batch of a rank: how many rows count, and the numbers of all its rows."""
    made, shares = loader(day, rank, ranks, **options)
    numbers = [row_numbers(dense) for _, dense, _ in made]
    assert made.epoch == 1
    return list(zip(shares, numbers, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("shuffle", [True, False])
def test_any_number_of_ranks_sees_each_row_once(day, ranks, shuffle):
    taken = [epoch(day, rank, ranks, shuffle=shuffle, uneven="join") for rank in range(ranks)]
    assert sorted(n for batches in taken for share, rows in batches for n in rows[:share]) == list(range(101))
    assert {len(batches) for batches in taken} == {len(loader(day, 0, ranks, shuffle=shuffle)[0])}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pad_fills_the_last_step_with_rows_of_the_ranks_own(day, ranks):
    taken = [epoch(day, rank, ranks, shuffle=True) for rank in range(ranks)]
    for step in zip(*taken, strict=True):
        assert len({(share, len(rows)) for share, rows in step}) == 1, "all ranks hold equally many"
    seen = [{n for _, rows in batches for n in rows} for batches in taken]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 101


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_drop_keeps_full_batches(day, ranks):
    taken = [epoch(day, rank, ranks, shuffle=True, uneven="drop") for rank in range(ranks)]
    assert {len(batches) for batches in taken} == {101 // (6 * ranks)}
    assert {share for batches in taken for share, _ in batches} == {6}


def test_row_order_follows_files_or_is_shuffled_per_epoch(day):
    """Rows come in the order of the files without shuffle, and in another order in each epoch with it."""
    assert [n for _, rows in epoch(day, 0, 1, shuffle=False) for n in rows] == list(range(101))
    made, _ = loader(day)
    first, second = ([n for _, dense, _ in made for n in row_numbers(dense)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second != list(range(101))
    assert first == [n for _, dense, _ in loader(day)[0] for n in row_numbers(dense)], "the seed decides"
    within = [abs(a - b) for a, b in itertools.pairwise(first)]
    assert sum(step == 1 for step in within) < 30, "rows are mixed within a window, not blocks alone"


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stop", [1, 4, 8, 9])
def test_a_stopped_loader_goes_on_exactly(day, ranks, workers, stop):
    for rank in range(ranks):
        whole = [row_numbers(dense) for _, dense, _ in loader(day, rank, ranks, workers=workers)[0]]
        before, _ = loader(day, rank, ranks)
        seen = [row_numbers(dense) for _, (_, dense, _) in zip(range(stop), before, strict=False)]
        after, _ = loader(day, rank, ranks, workers=workers)
        after.load_state_dict(before.state_dict())
        assert seen + [row_numbers(dense) for _, dense, _ in after] == whole


def test_going_on_reads_only_what_is_left(day, monkeypatch):
    from echelon.data.ctr import ctr_files

    fetched = []
    fetch = ctr_files.CtrReader.fetch
    monkeypatch.setattr(
        ctr_files.CtrReader, "fetch", lambda self, number: fetched.append(number) or fetch(self, number)
    )
    before, _ = loader(day, shuffle=False)
    for _ in zip(range(15), before, strict=False):
        pass
    fetched.clear()
    after, _ = loader(day, shuffle=False)
    after.load_state_dict(before.state_dict())
    assert len(list(after)) == 2
    assert 0 < len(fetched) <= 4 < len(day.block_rows)


def test_another_number_of_ranks_cannot_go_on_in_the_middle(day):
    before, _ = loader(day, 0, 2)
    next(iter(before))
    with pytest.raises(DataError, match="use world_size=2 until that epoch is done"):
        loader(day, 0, 3)[0].load_state_dict(before.state_dict())


def test_a_loop_left_early_leaves_no_thread(day):
    import threading

    before = set(threading.enumerate())
    for _ in loader(day)[0]:
        break
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("echelon")]


# -- broken lines -------------------------------------------------------------------------------------------------


def broken_day(path):
    """60 rows; rows 5 (too short), 23 (a word for a number), 24 (empty), 40 (no label), 60 (too long) are broken."""
    rows = criteo_rows(60)
    good = [row for number, row in enumerate(rows, 1) if number not in (5, 23, 24, 40, 60)]
    rows[4] = rows[4][:20]
    rows[22][3] = "many"
    rows[23] = []
    rows[39][0] = ""
    rows[59] = [*rows[59], "more"]
    return write_lines(path, rows), good


@pytest.mark.parametrize("block_bytes", [700, 2**20])
def test_broken_lines_are_left_out_and_counted(tmp_path, block_bytes):
    path, good = broken_day(tmp_path / "a.tsv")
    dataset = CtrFiles(path, format="criteo", broken="skip", block_bytes=block_bytes)
    made, shares = loader(dataset, shuffle=False)
    batches = list(made)
    same([torch.cat(column).numpy() for column in zip(*batches, strict=True)], plain(good))
    assert shares == [len(label) for *_, label in batches]
    assert dataset.skipped == 5
    assert dataset.first_skipped.startswith(f"{path}, row 5: Expected 40 columns, got 20")
    assert sorted(n for _, rows in epoch(dataset, 0, 1) for n in rows) == [int(row[1]) for row in good]


REASONS = [
    (lambda rows: rows[4].__delitem__(slice(20, None)), "row 5: Expected 40 columns, got 20"),
    (
        lambda rows: rows[22].__setitem__(3, "many"),
        "row 23: In CSV column #3: CSV conversion error to float: invalid value 'many'",
    ),
    (lambda rows: rows[23].clear(), "row 24: the line is empty"),
    (lambda rows: rows[39].__setitem__(0, ""), "row 40: no value in the label column 'label'"),
]


@pytest.mark.parametrize("spoil,line", REASONS)  # noqa: PT006
def test_a_broken_line_is_named(tmp_path, spoil, line):
    rows = criteo_rows(60)
    spoil(rows)
    path = write_lines(tmp_path / "a.tsv", rows)
    with pytest.raises(DataError) as raised:
        read(CtrFiles(path, format="criteo", block_bytes=3000))
    assert str(raised.value).startswith(f"{path}, {line}")
    assert str(raised.value).endswith("; repair the line, or pass broken='skip' to leave such lines out")
    assert "\n" not in str(raised.value)


def test_row_numbers_count_headers_but_not_trailing_empty_lines(tmp_path):
    (tmp_path / "a.csv").write_text("label,x\n1,2\n0,oops\n\n\n")
    dataset = CtrFiles(tmp_path / "a.csv", format="csv", numeric=["x"])
    assert len(dataset) == 2
    with pytest.raises(DataError, match=r"a\.csv, row 3: .*'oops'"):
        read(dataset)


def test_rows_of_parquet_without_a_label(tmp_path):
    parquet.write_table(
        pa.table({"label": [1, 0, None, 1], "x": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "a.parquet", row_group_size=2
    )
    options = {"format": "parquet", "numeric": ["x"], "transform": "none"}
    with pytest.raises(DataError, match=r"a\.parquet: row 3: no value in the label column 'label'; repair it"):
        read(CtrFiles(tmp_path / "a.parquet", **options))
    dataset = CtrFiles(tmp_path / "a.parquet", broken="skip", **options)
    assert read(dataset)[1][:, 0].tolist() == [1, 2, 4]
    assert dataset.skipped == 1


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


def test_a_gzip_file_that_was_cut_short(tmp_path):
    path = write_lines(tmp_path / "a.gz", criteo_rows(20))
    cut_short(path)
    with pytest.raises(DataError, match=r"a\.gz cannot be read: Compressed file ended .*; check the file"):
        CtrFiles(path, format="criteo")


MISTAKES = [
    ({"format": "tsv"}, UsageError, "format='tsv': expected 'criteo', 'csv' or 'parquet'"),
    ({"broken": "ignore"}, UsageError, "broken='ignore': expected 'error' or 'skip'"),
    ({"format": "criteo", "numeric": ["x"]}, UsageError, "numeric= is for CSV and Parquet"),
    (
        {"format": "criteo", "numeric": [], "label": "click"},
        UsageError,
        "label='click': with format='criteo' it is the first column",
    ),
    ({"numeric": []}, DataError, "neither numeric= nor categorical= columns"),
    ({"categorical": ["x"]}, DataError, "column 'x' is named twice"),
    ({"transform": "log"}, DataError, "transform='log': expected 'log1p', 'none' or a function"),
    ({"numeric": ["xx"]}, DataError, "a.csv has no column 'xx'"),
    ({"format": "parquet"}, DataError, "a.csv cannot be read as Parquet"),
    ({"delimiter": "::"}, UsageError, "delimiter='::': expected one character"),
    ({"transform": lambda x: x[:1]}, DataError, "keep the shape"),
    ({"loader": {"collate": list}}, DataError, "collate= is not for this data set: its batches are made already"),
    ({"loader": {"cache": True}}, DataError, "cache= is not for this data set"),
    ({"loader": {"world_size": 4}}, DataError, "2 samples for 4 ranks"),
    ({"paths": "none/*.csv"}, DataError, "no file matches 'none/*.csv'"),
    ({"paths": ["none.csv"]}, DataError, "none.csv is no file"),
    ({"paths": []}, DataError, "an empty list of files"),
]


@pytest.mark.parametrize("changes,kind,line", MISTAKES, ids=[line for *_, line in MISTAKES])  # noqa: PT006
def test_a_mistake_is_one_line(tmp_path, changes, kind, line):
    (tmp_path / "a.csv").write_text("label,x\n1,2\n0,3\n")
    options = {"paths": tmp_path / "a.csv", "format": "csv", "numeric": ["x"], **changes}
    extra, paths = options.pop("loader", {}), options.pop("paths")
    with pytest.raises(kind) as raised:
        read(CtrFiles(paths, **options), **extra)
    assert line in str(raised.value)
    assert isinstance(raised.value, EchelonError)
    assert "\n" not in str(raised.value)


def test_pyarrow_and_numba_are_imported_only_when_used():
    code = (
        "import sys, echelon.data; echelon.data.CtrFiles; print([m for m in ('pyarrow', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- real data ----------------------------------------------------------------------------------------------------

ADULT = [
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital", "occupation", "relationship", "race"),
    *("sex", "gain", "loss", "hours", "country", "income"),
]
WORDS = [ADULT[at] for at in (1, 3, 5, 6, 7, 8, 9, 13)]
NUMBERS = [ADULT[at] for at in (0, 2, 4, 10, 11, 12)]


def adult_files():
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return sorted(Path(os.environ.get("ECHELON_TEST_DATA", beside)).glob("adult-*.csv.gz"))


@pytest.mark.skipif(len(adult_files()) != 2, reason="no Adult data in ../shared/data or $ECHELON_TEST_DATA")
def test_adult_equals_a_plain_reader():
    dataset = CtrFiles(
        adult_files(),
        format="csv",
        names=ADULT,
        label="income",
        positive=[">50K", ">50K."],
        numeric=NUMBERS,
        categorical=WORDS,
        missing=["", " ?"],
        block_bytes=2**18,
    )
    rows = []
    for path in adult_files():
        with gzip.open(path, "rt", newline="") as file:
            rows += [dict(zip(ADULT, row, strict=True)) for row in csv.reader(file)]
    assert len(dataset) == len(rows) == 32561 + 16281
    ids, dense, label = read(dataset, batch_size=1000)
    for slot, name in enumerate(WORDS):
        known = {text: text_id(None if text == " ?" else text, salt_of(name)) for text in {row[name] for row in rows}}
        assert ids[:, slot].tolist() == [known[row[name]] for row in rows]
        assert len(set(known.values())) == len(known)
    np.testing.assert_allclose(dense, np.log1p([[float(row[name]) for name in NUMBERS] for row in rows]), rtol=1e-6)
    assert label.tolist() == [float(row["income"].strip(" .") == ">50K") for row in rows]
