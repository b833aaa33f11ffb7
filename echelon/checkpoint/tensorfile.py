"""Reads and writes one safetensors file: written in one pass with a checksum per tensor, read by position and verified.

The format is an 8-byte length, a JSON header of that length, then the tensors without gaps. Writing it here and not
with the safetensors library saves a copy of every tensor, and adds checksums and fsync.

Checksum: CRC-32 from zlib. Measured on one core of an AMD EPYC: crc32 4.2 GB/s, sha256 1.8, blake2b 0.9. It detects
every burst of up to 32 bits, and misses one in four billion of other damages; it protects against accidents, not
against attacks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from echelon.base.errors import Damaged
from echelon.base.json_head import write_head
from echelon.checkpoint.os_errors import cannot_read, open_regular

_BLOCK = 64 << 20  # bytes checksummed and then written while still in a cache, with the GIL released


@dataclass(frozen=True)
class TensorSlot:
    """A tensor to be written: its name, safetensors dtype, shape and size in this file."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


@dataclass(frozen=True)
class FileRecord:
    """Size and header of a file, as the index records them."""

    nbytes: int
    header_nbytes: int
    header_checksum: str


@dataclass(frozen=True)
class TensorByteSpan:
    """The position of a tensor's bytes in a file, and their checksum."""

    start: int
    nbytes: int
    checksum: str


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    return zlib.crc32(data, before)


def in_hex(value: int) -> str:
    return f"{value:08x}"


def write(
    path: Path, slots: Sequence[TensorSlot], contents: Iterable[memoryview], note: dict[str, str] | None = None
) -> tuple[FileRecord, list[TensorByteSpan]]:
    """Write ``contents``, one for each slot in order; return after they are on disk."""
    header = header_of(slots, note)
    spans, start = [], len(header)
    with path.open("wb") as file:
        file.write(header)
        for slot, content in zip(slots, contents, strict=True):
            assert content.nbytes == slot.nbytes, slot.name
            spans.append(TensorByteSpan(start, slot.nbytes, in_hex(_write_blocks(file, content))))
            start += slot.nbytes
        _flush(file)
    return FileRecord(start, len(header), in_hex(checksum(header))), spans


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file; return after it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        _flush(file)


@contextmanager
def open_tensor_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; OS errors become ``CheckpointError``."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise cannot_read(path, error) from None


def check_whole(path: Path, file: BinaryIO, record: FileRecord) -> None:
    """Raise ``Damaged`` unless length and header are as they were written."""
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != record.nbytes:
        change = "truncated" if nbytes < record.nbytes else "changed"
        raise Damaged(f"{path} is {change}: {nbytes} bytes instead of {record.nbytes}; {_use_another(path)}")
    if in_hex(checksum(file.read(record.header_nbytes))) != record.header_checksum:
        raise Damaged(f"{path} is damaged: its header does not match its checksum; {_use_another(path)}")


def read(file: BinaryIO, path: Path, name: str, span: TensorByteSpan) -> numpy.typing.NDArray[numpy.uint8]:
    """Return the bytes of ``span``; raise ``Damaged`` if the checksum differs."""
    content = numpy.empty(span.nbytes, dtype=numpy.uint8)
    file.seek(span.start)
    got = file.readinto(content.data) if span.nbytes else 0  # type: ignore[attr-defined]
    if got != span.nbytes or in_hex(checksum(content.data)) != span.checksum:
        raise Damaged(f"{path} is damaged: '{name}' does not match its checksum; {_use_another(path)}")
    return content


def _write_blocks(file: BinaryIO, content: memoryview) -> int:
    running = 0
    for begin in range(0, content.nbytes, _BLOCK):
        block = content[begin : begin + _BLOCK]
        running = checksum(block, running)
        file.write(block)
    return running


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def header_of(slots: Sequence[TensorSlot], note: dict[str, str] | None, nbytes: int = 0) -> bytes:
    """Return the header of a file, of at least ``nbytes`` bytes; tensors start on a multiple of 8."""
    fields: dict[str, Any] = {"__metadata__": note} if note else {}
    begin = 0
    for slot in slots:
        fields[slot.name] = {
            "dtype": slot.dtype,
            "shape": slot.shape,
            "data_offsets": [begin, begin + slot.nbytes],
        }
        begin += slot.nbytes
    return write_head(fields, align=8, nbytes=nbytes)


def _use_another(path: Path) -> str:
    return f"copy {path.parent.name} again from its source, or remove it and use an earlier checkpoint"
