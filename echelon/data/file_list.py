"""``FileList``: data in many files, too large for every rank to read; each rank reads its own files only."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from echelon.base.errors import DataError
from echelon.data.seeding import SeedPurpose, numpy_stream


class FileList:
    """Files that are divided among the ranks anew in every epoch.

    paths: list of paths, or a pattern such as ``"data/**/*.jsonl"``
    read:  function that returns the samples of one file

    >>> files = echelon.data.FileList("data/*.txt", read=open)
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], read: Callable[[str], Iterable[Any]]
    ) -> None:
        if isinstance(paths, str | os.PathLike):
            self.paths = sorted(glob.glob(os.fspath(paths), recursive=True))
            if not self.paths:
                raise DataError(f"no file matches '{os.fspath(paths)}' from {os.getcwd()}; check the pattern")
        else:
            self.paths = [os.fspath(path) for path in paths]
        self.read = read

    def __repr__(self) -> str:
        return f"FileList({len(self.paths)} files)"

    def arranged(self, seed: int, epoch: int) -> FileList:
        """Return the same files in the shuffled order of ``epoch``."""
        order = numpy_stream(seed, SeedPurpose.FILES, epoch).permutation(len(self.paths))
        return FileList([self.paths[at] for at in order], self.read)

    def shard(self, index: int, count: int) -> Iterator[Any]:
        """Yield the samples of every ``count``-th file from ``index`` on."""
        for path in self.paths[index::count]:
            try:
                yield from self.read(path)
            except Exception as error:
                error.add_note(f"echelon: while reading {path}")
                raise

    def check(self, ranks: int) -> None:
        if len(self.paths) < ranks:
            raise DataError(
                f"{len(self.paths)} files for {ranks} ranks: every rank needs a file of its own; "
                f"split the data into {ranks} files or more, or use fewer ranks"
            )
