"""``PartitionStream``: a directory to which partitions are added, such as one an hour, as a stream that waits."""

from __future__ import annotations

import glob
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from echelon.base.console import say
from echelon.base.environment import PS_SESSION, RESTART_COUNT, RESTARTS, RUN_ID, whole_number
from echelon.base.errors import DataError, UsageError
from echelon.data.ctr.text import open_text
from echelon.data.partition_ledger import Partition, PartitionLedger
from echelon.data.resumable_source import ResumableStream

LEDGER = "_order.jsonl"  #: the ledger's name in the directory, unless another is given
STARTED = time.time()  #: before the ranks of this job have met


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text file, plain or gzip, without their ends."""
    with open_text(path) as file:
        for line in file:
            yield line.decode("utf-8").rstrip("\r\n")


class PartitionStream(ResumableStream):
    """Records of files in partitions: directories that are complete when a file says so. It waits for further ones.

    root:         directory of the partitions
    read:         function that returns the records of a file; default: its lines as text, plain or gzip
    parse:        function that makes a sample of a record, on the rank that keeps it only; default: the record itself
    partitions:   pattern of the directories below ``root``; default: all that have the done-file
    files:        pattern of the files in a partition
    done:         name of the file that says that a partition is complete
    stop:         name of a file in ``root``: the stream ends when it is there and all complete partitions are read
    idle_seconds: seconds without a new partition after which the stream ends; 0: after what is there; None (default):
                  it waits until the stop file is there
    poll_seconds: seconds between two looks at the directory, default 1
    repeat:       True reads all partitions again in every epoch; default False: an epoch reads on behind the one before
    ledger:       file that holds the order in which partitions were taken; default ``_order.jsonl`` in ``root``

    All ranks see ``root`` and the ledger under the same path. Rank 0 writes the ledger.

    >>> stream = echelon.data.PartitionStream("data", files="part-*.csv.gz", idle_seconds=3600)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read: Callable[[str], Iterable[Any]] = read_lines,
        parse: Callable[[Any], Any] | None = None,
        partitions: str = "**",
        files: str = "*",
        done: str = "_SUCCESS",
        stop: str = "_STOP",
        idle_seconds: float | None = None,
        poll_seconds: float = 1.0,
        repeat: bool = False,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(parse, repeat)
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"{self.root} is no directory; create it, or correct the path")
        if poll_seconds <= 0 or (idle_seconds is not None and idle_seconds < 0):
            raise UsageError(
                f"PartitionStream(idle_seconds={idle_seconds}, poll_seconds={poll_seconds}): expected 0 seconds or "
                "more without partitions, and more than 0 between two looks"
            )
        self._read = read
        self._partitions, self._files, self._done, self._stop = partitions, files, done, stop
        self._idle, self._poll = idle_seconds, poll_seconds
        self._ledger = PartitionLedger(os.fspath(ledger if ledger is not None else self.root / LEDGER))
        self._leads, self._job = True, uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"PartitionStream({os.fspath(self.root)!r})"

    def join(self, rank: int, ranks: int) -> None:
        self._leads = rank == 0
        if ranks > 1:
            self._job = job_name()

    def samples_after(self, place: Any) -> Iterator[tuple[Any, Any]]:
        if self._leads:
            self._ledger.lead()
        try:
            yield from self._samples_after(place)
        finally:
            self._ledger.release()

    def _samples_after(self, place: Any) -> Iterator[tuple[Any, Any]]:
        number, first, row = (0, 0, 0) if place is None else (place["partition"], place["file"], place["row"])
        name = None if place is None else place["name"]
        while (partition := self._wait_for(number)) is not None:
            if name is not None and partition.name != name:
                raise DataError(
                    f"{self._ledger.path} has '{partition.name}' as partition {number}, and this run was in '{name}' "
                    "there; restore the file, or begin anew"
                )
            for at in range(first, len(partition.files)):
                for count, record in self._records(partition, at, row):
                    yield {"partition": number, "name": partition.name, "file": at, "row": count}, record
                row = 0
            number, first, name = number + 1, 0, None

    def _records(self, partition: Partition, at: int, behind: int) -> Iterator[tuple[int, Any]]:
        """Yield the records of a file with their numbers, from 1; the first ``behind`` are left out."""
        path = self.root / partition.name / partition.files[at]
        try:
            for count, record in enumerate(self._read(os.fspath(path)), start=1):
                if count > behind:
                    yield count, record
        except FileNotFoundError:
            raise DataError(
                f"{path} is gone, and it is part of the stream; keep partitions until they are trained on"
            ) from None
        except Exception as error:
            error.add_note(f"echelon: while reading {path}")
            raise

    def _wait_for(self, number: int) -> Partition | None:
        """Return a partition by its number; None at the end of the stream."""
        since, announced = time.monotonic(), False
        while True:
            lines = self._ledger.lines()
            taken = [line for line in lines if not line.end]
            if number < len(taken):
                return taken[number]
            # an end counts at its place in the order only, and for the job that has waited there
            ends = [line.end for line in _behind(lines, number) if self._is_ours(line)]
            if ends:
                if self._leads:
                    say(f"stream: {self.root}: ended after {number} partitions: {ends[-1]}")
                return None
            if self._leads and self._take({line.name for line in taken}, since):
                continue
            if not announced and self._leads:
                say(f"stream: {self.root}: waiting for a partition after {number} of them, {self._until()}")
                announced = True
            time.sleep(self._poll)

    def _take(self, known: set[str], since: float) -> bool:
        """Append what is new to the ledger: partitions, or the end. Return False if there is nothing."""
        stopped = (self.root / self._stop).exists()  # before the search, so that it finds all that came before
        new = [self._described(name) for name in self._complete() if name not in known]
        if not new and stopped:
            new = [self._end(f"{self._stop} is there")]
        elif not new and self._idle is not None and time.monotonic() - since >= self._idle:
            new = [self._end(f"no partition came for {self._idle:g} s")]
        if new:
            self._ledger.append(new)
        return bool(new)

    def _end(self, reason: str) -> Partition:
        return Partition("", (), reason, self._job, time.time())

    def _is_ours(self, line: Partition) -> bool:
        """Return True for an end of this job, and not of an earlier one that was started under the same name."""
        return line.job == self._job and (was_restarted() or line.time >= STARTED)

    def _complete(self) -> list[str]:
        """Return the names of complete partitions in alphabetical order."""
        pattern = os.path.join(glob.escape(os.fspath(self.root)), self._partitions, self._done)
        found = {os.path.relpath(os.path.dirname(path), self.root) for path in glob.glob(pattern, recursive=True)}
        return sorted(found - {"."})

    def _described(self, name: str) -> Partition:
        home = self.root / name
        files = [path.name for path in home.glob(self._files) if path.is_file() and path.name != self._done]
        return Partition(name, tuple(sorted(files)))

    def _until(self) -> str:
        by_time = "" if self._idle is None else f" or {self._idle:g} s are over"
        return f"until {self.root / self._stop} is there{by_time}"


def _behind(lines: list[Partition], number: int) -> list[Partition]:
    """Return the ends behind ``number`` partitions, which is all there are."""
    behind, seen = list[Partition](), 0
    for line in lines:
        if not line.end:
            seen += 1
        elif seen == number:
            behind.append(line)
    return behind


def job_name() -> str:
    """Return a name of this start of the job that is the same on all ranks."""
    names = (PS_SESSION,) if PS_SESSION in os.environ else (RUN_ID, "MASTER_ADDR", "MASTER_PORT", RESTART_COUNT)
    return "/".join(os.environ.get(name, "") for name in names)


def was_restarted() -> bool:
    """Return True if the launcher has started this process again, so that its job is older than itself."""
    return any(whole_number(os.environ, name, 0) > 0 for name in (RESTARTS, RESTART_COUNT))
