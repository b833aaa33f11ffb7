"""Streams with places: each record once, for any ranks; a stopped run goes on behind its place."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run

import echelon
from echelon.base.errors import DataError, UsageError
from echelon.data import Loader, OffsetStream, PartitionStream

RECORDS = 47


class Numbers:
    """Yields (offset, number), and counts what is read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, offset: int | None) -> Iterator[tuple[int, int]]:
        for number in range(0 if offset is None else offset + 1, RECORDS):
            self.read += 1
            yield number, number * 10


class Seeking:
    def __init__(self) -> None:
        self._behind: list[Any] | None = None

    def seek(self, offset: Any) -> None:
        self._behind = offset

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        first = 0 if self._behind is None else self._behind[1] + 1
        return (([0, number], number * 10) for number in range(first, RECORDS))


class Stateful:
    def __init__(self) -> None:
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self._at < RECORDS:
            self._at += 1
            yield (self._at - 1) * 10


SOURCES = {"function": Numbers, "seek": Seeking, "state": Stateful}


def loader_of(source: Any = None, **options: Any) -> Loader:
    stream = OffsetStream(Numbers() if source is None else source, parse=lambda record: record // 10, repeat=True)
    return Loader(stream, **{"batch_size": 4, "shuffle": False, "seed": 3, **options})


def shares(ranks: int, **options: Any) -> list[list[int]]:
    """Return the global batches, joined from the ranks' shares that count."""
    parts = []
    for rank in range(ranks):
        counts: list[int] = []
        loader = loader_of(rank=rank, world_size=ranks, on_share=counts.append, uneven="join", **options)
        parts.append([batch.tolist()[: counts[-1]] for batch in loader])
    return [list(chain(*batches)) for batches in zip(*parts, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_divide_records_as_one_process_reads_them(shuffle: bool) -> None:
    alone = shares(1, batch_size=12, shuffle=shuffle, shuffle_buffer=10)
    assert sorted(chain(*alone)) == list(range(RECORDS))
    assert (list(chain(*alone)) == list(range(RECORDS))) == (not shuffle)
    for ranks in (2, 3):
        assert shares(ranks, batch_size=12 // ranks, shuffle=shuffle, shuffle_buffer=10) == alone


@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer": 10}], ids=["in order", "shuffled"])
def test_a_stopped_run_reads_on_behind_its_place(uneven: str, options: dict[str, Any]) -> None:
    for rank in range(2):
        given = {"rank": rank, "world_size": 2, "uneven": uneven, **options}
        loader = loader_of(**given)
        expected = [batch.tolist() for _ in loader.epochs(2) for batch in loader]
        for stop in range(1, len(expected) + 1):
            loader, seen, state = loader_of(**given), [], None
            for _ in loader.epochs(2):
                for batch in loader:
                    seen.append(batch.tolist())
                    if len(seen) == stop:
                        state = json.loads(json.dumps(loader.state_dict()))
                        epoch, used = loader.epoch, loader._cursor.samples
                        break
                if state is not None:
                    break
            source = Numbers()
            again = loader_of(source, **given)
            again.load_state_dict(state)
            seen += [batch.tolist() for _ in again.epochs(2) for batch in again]
            assert seen == expected, (rank, stop)
            window = options.get("shuffle_buffer", 1)
            rest = RECORDS - used // window * window
            assert source.read <= rest + (1 - epoch) * RECORDS


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_resumes(kind: str) -> None:
    expected = [batch.tolist() for batch in loader_of(SOURCES[kind](), uneven="join")]
    assert list(chain(*expected)) == list(range(RECORDS))
    loader = loader_of(SOURCES[kind](), uneven="join")
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(5)]
    again = loader_of(SOURCES[kind](), uneven="join")
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first + [batch.tolist() for batch in again] == expected


def test_other_ranks_and_batch_sizes_go_on_at_the_record() -> None:
    before = loader_of(batch_size=8)
    batches = iter(before)
    seen = next(batches).tolist() + next(batches).tolist() + next(batches).tolist()
    for rank in range(2):
        counts: list[int] = []
        loader = loader_of(batch_size=3, rank=rank, world_size=2, uneven="join", on_share=counts.append)
        loader.load_state_dict(before.state_dict())
        seen += [number for batch in loader for number in batch.tolist()[: counts[-1]]]
    assert sorted(seen) == list(range(RECORDS))


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_of_a_stream_read_on(shuffle: bool) -> None:
    """Epochs go on where the stream ended or a loop was left, also inside of a window that was short then."""
    until = [9]

    def growing(offset: int | None) -> Iterator[tuple[int, int]]:
        return ((n, n) for n in range(0 if offset is None else offset + 1, until[0]))

    def loader() -> Loader:
        return Loader(OffsetStream(growing), batch_size=2, shuffle=shuffle, shuffle_buffer=6, seed=1, uneven="join")

    first, seen = loader(), []
    for batch in first:
        seen += batch.tolist()
        if len(seen) == 8:
            break  # the second window has three samples, of which two are used
    until[0] = 20
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in second:
        seen += batch.tolist()
        if len(seen) == 12:
            break
    rest = [number for batch in second for number in batch.tolist()]
    assert sorted(seen + rest) == list(range(20))
    assert (seen + rest == list(range(20))) == (not shuffle)
    assert second.epoch == 2
    assert list(second) == []


def test_only_the_rank_that_keeps_a_record_parses_it() -> None:
    parsed: list[int] = []

    def parse(record: int) -> int:
        parsed.append(record)
        return record

    list(Loader(OffsetStream(Numbers(), parse=parse), batch_size=4, rank=1, world_size=2, uneven="join", shuffle=False))
    assert parsed == [10 * n for n in range(RECORDS) if n % 8 >= 4]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: OffsetStream(3), r"OffsetStream\(int\): expected a function of an offset"),
        (
            lambda: next(iter(Loader(OffsetStream(lambda _: [1, 2]), batch_size=2))),
            "yielded a int; it has to yield pairs",
        ),
        (
            lambda: next(iter(Loader(OffsetStream(lambda _: [({1}, 1), ({2}, 2)]), batch_size=1, shuffle=False))),
            "the stream has set as a place, which no checkpoint can hold",
        ),
        (lambda: Loader(OffsetStream(Numbers()), batch_size=2, workers=2), "workers= is not for a stream with places"),
        (lambda: list(Loader(OffsetStream(lambda _: []), batch_size=2)), "the data set is empty"),
        (lambda: PartitionStream("nowhere"), "nowhere is no directory"),
    ],
)
def test_mistakes_with_streams_are_one_line(make: Any, line: str) -> None:
    with pytest.raises((DataError, UsageError), match=line):
        make()


# ---- partitions


def add(root: Path, name: str, parts: list[list[int]], done: bool = True) -> None:
    home = root / name
    home.mkdir(parents=True)
    for number, part in enumerate(parts):
        text = "".join(f"{value}\n" for value in part).encode()
        (home / f"part-{number}.gz").write_bytes(gzip.compress(text) if number % 2 else text)
    if done:
        (home / "_SUCCESS").touch()


def partitions(root: Path, **options: Any) -> PartitionStream:
    given = {"files": "part-*", "poll_seconds": 0.02, "idle_seconds": 0.0, "parse": int, **options}
    return PartitionStream(root, **given)


def read(root: Path, **options: Any) -> list[int]:
    loader = Loader(partitions(root, **options), batch_size=3, shuffle=False, uneven="join")
    return [number for batch in loader for number in batch.tolist()]


def test_partitions_are_read_when_they_are_complete(tmp_path: Path) -> None:
    add(tmp_path, "day1/02", [[4, 5], [], [6]])
    add(tmp_path, "day1/01", [[1, 2], [3]])
    add(tmp_path, "day1/03", [[7]], done=False)
    (tmp_path / "day1" / "02" / "notes.txt").write_text("100\n")
    assert read(tmp_path) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "day1" / "03" / "_SUCCESS").touch()
    add(tmp_path, "day1/00", [[0]])  # late: it is read after those that were taken before
    assert read(tmp_path) == [1, 2, 3, 4, 5, 6, 0, 7]


def test_a_stream_waits_and_ends_at_the_stop_file(tmp_path: Path, capfd: Any) -> None:
    def write() -> None:
        for number in range(4):
            time.sleep(0.05)
            add(tmp_path, f"hour{number}", [[number * 2, number * 2 + 1]])
        (tmp_path / "_STOP").touch()

    writer = threading.Thread(target=write)
    writer.start()
    assert read(tmp_path, idle_seconds=None) == list(range(8))
    writer.join()
    printed = capfd.readouterr().err
    assert f"stream: {tmp_path}: waiting for a partition after 0 of them, until {tmp_path}/_STOP is there" in printed
    assert "ended after 4 partitions: _STOP is there" in printed


def test_an_idle_end_is_said_and_ends_no_later_run(tmp_path: Path, capfd: Any) -> None:
    add(tmp_path, "a", [[1]])
    assert read(tmp_path, idle_seconds=0.1) == [1]
    assert "ended after 1 partitions: no partition came for 0.1 s" in capfd.readouterr().err
    loader = Loader(partitions(tmp_path), batch_size=1, shuffle=False, uneven="join")
    assert [batch.item() for batch in loader] == [1]
    state = loader.state_dict()
    add(tmp_path, "b", [[2]])
    again = Loader(partitions(tmp_path), batch_size=1, shuffle=False, uneven="join")
    again.load_state_dict(state)
    assert [batch.item() for batch in again] == [2]


def test_what_changes_under_a_stream_is_one_line(tmp_path: Path) -> None:
    add(tmp_path, "a", [[1, 2], [3]])
    loader = Loader(partitions(tmp_path), batch_size=2, shuffle=False)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(DataError, match=r"another run appends to .*_order.jsonl; give this one a ledger="):
        read(tmp_path)
    del loader
    (tmp_path / "a" / "part-1.gz").unlink()
    with pytest.raises(DataError, match=r"part-1.gz is gone, and it is part of the stream"):
        read(tmp_path)
    ledger = tmp_path / "_order.jsonl"
    ledger.write_text(ledger.read_text().replace('"a"', '"z"'))
    again = Loader(partitions(tmp_path), batch_size=2, shuffle=False)
    again.load_state_dict(state)
    with pytest.raises(DataError, match="has 'z' as partition 0, and this run was in 'a' there"):
        list(again)
    del again
    ledger.write_text("{}\n")
    with pytest.raises(DataError, match="has a line that is no partition"):
        read(tmp_path)


def rank_reads(root: str) -> list[list[int]]:
    """Rank 0 adds partitions while both read; rank 1 looks at the directory less often."""
    world = echelon.init(seed=0)
    model = torch.nn.Linear(1, 1)
    engine = echelon.distribute(
        model,
        loss=lambda output, target: (output[:, 0] - target).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        log=echelon.Log(console=False),
    )

    def parse(line: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(line)]), torch.tensor(float(line))

    stream = partitions(Path(root), parse=parse, idle_seconds=0.5, poll_seconds=(0.02, 0.13)[world.rank])
    seen = []
    for counts, (x, _) in enumerate(engine.loader(stream, global_batch=4, shuffle=False, uneven="join"), start=1):
        engine.step(x, x[:, 0])
        seen.append(x[:, 0].int().tolist())
        if world.rank == 0 and counts in (1, 2):
            add(Path(root), f"hour{9 - counts}", [[counts * 100 + n for n in range(5)]])  # the later one sorts before
    return seen


def test_ranks_agree_on_partitions_and_on_the_end(tmp_path: Path) -> None:
    add(tmp_path, "hour9", [[1, 2, 3], [4, 5]])
    parts = run(rank_reads, str(tmp_path), ranks=2)
    rows = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    expected = [1, 2, 3, 4, 5, *range(100, 105), *range(200, 205)]
    assert list(chain(*rows))[: len(expected)] == expected
