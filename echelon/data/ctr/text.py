"""Reads blocks of lines from text files, plain or gzip.

Each line is one row: values with a line break in them cannot be read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

from echelon.base.errors import DataError, nearest
from echelon.data.ctr.columns import CtrLayout

GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The longest line of a table, in bytes.
LONGEST_LINE = 64 * 2**20


class TextBlock(NamedTuple):
    path: str
    start: int
    length: int
    rows: int
    #: the index of its first line in the file, from 1
    line: int


def is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == GZIP


def open_text(path: str) -> IO[bytes]:
    """Open the file, decompressed; the caller closes it."""
    opened: Callable[[str], IO[bytes]] = gzip.GzipFile if is_gzip(path) else partial(open, mode="rb")  # type: ignore[assignment]
    return opened(path)


def read_header(path: str, delimiter: str, layout: CtrLayout) -> list[str]:
    """Return the names in a file's first line; raise ``DataError`` unless they include all columns of the layout."""
    with open_text(path) as file:
        line = file.readline(LONGEST_LINE)
    text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").rstrip("\r\n")
    names = [name.strip().strip('"') for name in text.split(delimiter)]
    for name in layout.columns:
        if name not in names:
            raise DataError(f"{path} has no column '{name}'{nearest(name, names)}")
        if names.count(name) > 1:
            raise DataError(f"{path} has {names.count(name)} columns '{name}'; give each a name of its own")
    return names


def index_text(path: str, *, header: bool, block_bytes: int) -> list[TextBlock]:
    """Return the blocks of a file: whole lines, about ``block_bytes`` each. Reads the file once without parsing."""
    try:
        with open_text(path) as file:
            return list(_blocks(path, file, header, block_bytes))
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def unreadable(path: str, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    return DataError(f"{path} cannot be read: {reason}; check the file")


def _blocks(path: str, file: IO[bytes], header: bool, block_bytes: int) -> Iterator[TextBlock]:
    start, line, held = _first_row(file, header), 1 + header, b""
    for text in _whole_lines(path, file, block_bytes):
        if held:
            rows = held.count(b"\n")
            yield TextBlock(path, start, len(held), rows, line)
            start, line = start + len(held), line + rows
        held = text
    held = held.rstrip(b"\r\n")  # empty lines at the end of a file are not rows
    if held:
        yield TextBlock(path, start, len(held), held.count(b"\n") + 1, line)


def _first_row(file: IO[bytes], header: bool) -> int:
    start = len(file.readline(LONGEST_LINE)) if header else 0
    file.seek(start)
    return start


def _whole_lines(path: str, file: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    rest = b""
    while piece := file.read(block_bytes):
        end = piece.rfind(b"\n") + 1
        if end:
            yield rest + piece[:end]
            rest = b""
        rest += piece[end:]
        if len(rest) > LONGEST_LINE:
            raise DataError(f"{path} has a line longer than {LONGEST_LINE >> 20} MiB; is this a text file?")
    if rest:
        yield rest


class FetchedText(NamedTuple):
    block: TextBlock
    text: bytes


class TextBlockReader:
    """Reads blocks in the order of a pass, and keeps the current file open: a gzip file is read sequentially."""

    def __init__(self, blocks: list[TextBlock]) -> None:
        self._blocks = blocks
        self._path: str | None = None
        self._file: Any = None

    def __call__(self, number: int) -> FetchedText:
        block = self._blocks[number]
        try:
            if self._path != block.path:
                self.close()
                self._file, self._path = open_text(block.path), block.path
            self._file.seek(block.start)
            text = self._file.read(block.length)
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(block.path, error) from None
        if len(text) < block.length:
            raise DataError(
                f"{block.path} has become shorter since it was opened; leave files alone while they are read"
            )
        return FetchedText(block, text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def __del__(self) -> None:
        self.close()
