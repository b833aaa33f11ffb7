"""Reads documents from text files: plain text, or JSON lines with a field of text, both also compressed by gzip."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

from echelon.base.errors import DataError

Documents = Literal["file", "blank", "line"]
#: A document that is a whole file is read in pieces of about this size, which end with a line.
PIECE_BYTES = 2**22
LEAST_PART, MOST_PART = 2**20, 2**26  #: bytes of a part of the corpus
_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")


class CorpusPart(NamedTuple):
    """The documents that begin in a range of bytes of a file; a compressed file is one range."""

    path: str
    begin: int
    end: int


class TextPiece(NamedTuple):
    """A document, or a piece of one; ``is_last`` is True for the last piece."""

    text: str
    is_last: bool


def corpus_files(given: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files of a corpus: those given, and all text files in given directories, in the order of names."""
    result: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.name.endswith(_SUFFIXES) and one.is_file())
            if not inside:
                raise DataError(f"{path} holds no {', '.join(_SUFFIXES)}; check the path")
            result += inside
        elif not path.is_file():
            raise DataError(f"no file at {path}; check the path")
        elif not path.name.endswith(_SUFFIXES):
            raise DataError(f"{path} is none of {', '.join(_SUFFIXES)}; rename or convert it")
        else:
            result.append(path)
    return result


def corpus_parts(files: Sequence[Path], documents: Documents, processes: int) -> list[CorpusPart]:
    """Return the ranges of the corpus that are tokenized one by one, in order; a few for each process at least."""
    total, result = sum(path.stat().st_size for path in files), []
    part_bytes = min(max(total // (4 * processes), LEAST_PART), MOST_PART)
    for path in files:
        size = path.stat().st_size
        is_whole = path.suffix == ".gz" or (documents == "file" and not _is_json(path))
        step = size if is_whole else part_bytes
        ranges = range(0, size, step) if size else ()
        result += [CorpusPart(str(path), begin, min(begin + step, size)) for begin in ranges]
    return result


def read_documents(part: CorpusPart, documents: Documents, field: str) -> Iterator[TextPiece]:
    """Yield the documents that begin in a part of the corpus."""
    path = Path(part.path)
    end = None if path.suffix == ".gz" else part.end
    with _opened(path) as file:
        try:
            if _is_json(path):
                yield from (TextPiece(_text(line, path, at, field), True) for at, line in _lines(file, part.begin, end))
            elif documents == "line":
                yield from (TextPiece(_decoded(line, path, at), True) for at, line in _lines(file, part.begin, end))
            elif documents == "blank":
                yield from _paragraphs(file, path, part.begin, end)
            else:
                yield from _whole(file, path)
        except (EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is a damaged gzip file: {error}; copy it again") from None


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(file: IO[bytes], begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the range and are not blank, without line ends, each with its place."""
    for at, line in _all_lines(file, begin):
        if end is not None and at >= end:
            return
        if line.strip():
            yield at, line.rstrip(b"\r\n")


def _all_lines(file: IO[bytes], begin: int) -> Iterator[tuple[int, bytes]]:
    at = begin
    if begin:
        file.seek(begin - 1)
        at = begin - 1 + len(file.readline())
    for line in file:
        yield at, line
        at += len(line)


def _paragraphs(file: IO[bytes], path: Path, begin: int, end: int | None) -> Iterator[TextPiece]:
    """Yield documents between blank lines. A document belongs to the range in which the blank line before it begins."""
    is_inside, held, start = begin == 0, list[bytes](), 0
    for at, line in _all_lines(file, begin):
        if line.strip():
            if is_inside:
                start = start if held else at
                held.append(line)
            continue
        if held:
            yield TextPiece(_decoded(b"".join(held), path, start), True)
        held, is_inside = [], end is None or at < end
        if not is_inside:
            return
    if held:
        yield TextPiece(_decoded(b"".join(held), path, start), True)


def _whole(file: IO[bytes], path: Path) -> Iterator[TextPiece]:
    at, piece = 0, file.read(PIECE_BYTES) + file.readline()
    while piece:
        following = file.read(PIECE_BYTES) + file.readline()
        yield TextPiece(_decoded(piece, path, at), not following)
        at, piece = at + len(piece), following


def _text(line: bytes, path: Path, at: int, field: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        raise DataError(f"{path}: the line at byte {at:,} is no JSON; repair it") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        names = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{path}: the line at byte {at:,} has no text '{field}'; it has {names}: name it with --field")
    return str(value[field])


def _decoded(text: bytes, path: Path, at: int) -> str:
    try:
        return (text.removeprefix(b"\xef\xbb\xbf") if at == 0 else text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {at + error.start:,}); convert it") from None


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))
