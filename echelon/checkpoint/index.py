"""``index.json``: the contents of a checkpoint. The last line is a checksum over every byte before it.

The index decides what is read, so everything in it is checked before use: types, ranges, file names, that the pieces
of a tensor fill it, and that the pieces in a file fill the file. So a malicious checkpoint is refused: it cannot make
the reader open other files, allocate more than the checkpoint holds, or run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError, Damaged
from echelon.base.formatting import brief
from echelon.base.json_head import MalformedHeadError, parse_object
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory import INDEX
from echelon.checkpoint.os_errors import cannot_read, open_regular
from echelon.checkpoint.tensorfile import FileRecord, TensorByteSpan
from echelon.distributed.tensor_region import TensorRegion

FORMAT = "echelon-checkpoint"
VERSION = 1
_SEAL = b',\n"checksum": "'
_SEALED_END = re.compile(rb'([0-9a-f]{8})"\n}\n')
_FILE_NAME = re.compile(r"rank-\d{1,9}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_LARGEST = 2**63 - 1
_MOST_DIMENSIONS = 64  # torch's own limit


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor, and the file, name and bytes that store it."""

    file: str
    name: str
    region: TensorRegion
    span: TensorByteSpan


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor and its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """The contents of ``index.json``."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorEntry]
    facts: dict[str, Any]

    def to_bytes(self) -> bytes:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "files": {name: asdict(record) for name, record in self.files.items()},
            "tensors": {name: _entry_to_json(entry) for name, entry in self.tensors.items()},
            "facts": self.facts,
        }
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        text = ("{\n" + ",\n".join(lines)).encode()
        return text + _SEAL + tensorfile.in_hex(tensorfile.checksum(text)).encode() + b'"\n}\n'

    def check(self) -> None:
        """Raise ``MalformedIndexError`` unless the pieces exactly fill the tensors and the files."""
        for name, entry in self.tensors.items():
            _check_filled(name, entry)
        _check_files_filled(self)


class MalformedIndexError(ValueError):
    """The index contradicts itself or has invalid values."""


def read_index(checkpoint: Path) -> CheckpointIndex:
    """Read and verify the index of the checkpoint in that directory."""
    path = checkpoint / INDEX
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise cannot_read(path, error) from None
    content = _unseal(path, data)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {brief(content.get('format'))} version {brief(content.get('version'))}, this "
            f"Echelon reads {FORMAT} version {VERSION}; use the Echelon that wrote it, or another checkpoint"
        )
    try:
        index = _from_json(content)
        index.check()
    except (MalformedIndexError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a usable index: {error}; use another checkpoint") from None
    return index


def plain_facts(facts: Any) -> dict[str, Any]:
    """Return ``facts`` if JSON preserves them exactly (except that a tuple becomes a list); raise otherwise."""
    if not isinstance(facts, dict):
        raise CheckpointError(f"the metadata of a checkpoint (facts=) must be a dict, got {type(facts).__name__}")
    _check_plain(facts, "facts")
    return facts


def _unseal(path: Path, data: bytes) -> dict[str, Any]:
    text, _, end = data.rpartition(_SEAL)
    seal = _SEALED_END.fullmatch(end)
    if seal is None or seal[1].decode() != tensorfile.in_hex(tensorfile.checksum(text)):
        raise Damaged(
            f"{path} is damaged or truncated: it does not match its checksum; "
            f"copy {path.parent.name} again from its source, or remove it and use an earlier checkpoint"
        )
    try:
        return parse_object(data)
    except MalformedHeadError as error:
        raise CheckpointError(f"{path} is not a usable index: it is {error}; use another checkpoint") from None


def _entry_to_json(entry: TensorEntry) -> dict[str, Any]:
    chunks = [
        {
            "file": chunk.file,
            "name": chunk.name,
            "offsets": chunk.region.offsets,
            "sizes": chunk.region.sizes,
            "start": chunk.span.start,
            "nbytes": chunk.span.nbytes,
            "checksum": chunk.span.checksum,
        }
        for chunk in entry.chunks
    ]
    return {"dtype": dtypes.name_of(entry.dtype), "shape": entry.shape, "chunks": chunks}


def _from_json(content: Mapping[str, Any]) -> CheckpointIndex:
    return CheckpointIndex(
        step=_whole(content, "step"),
        world_size=_whole(content, "world_size"),
        files={_file_name(name): _file_record(value) for name, value in _object(content, "files").items()},
        tensors={name: _entry(name, value) for name, value in _object(content, "tensors").items()},
        facts=_object(content, "facts"),
    )


def _file_record(value: Any) -> FileRecord:
    fields = _as_object(value)
    return FileRecord(_whole(fields, "nbytes"), _whole(fields, "header_nbytes"), _sum_of(fields, "header_checksum"))


def _entry(name: str, value: Any) -> TensorEntry:
    fields = _as_object(value)
    dtype = dtypes.dtype_named(_text(fields, "dtype"))
    if dtype is None:
        raise MalformedIndexError(f"dtype {brief(fields['dtype'])} is unknown")
    shape = _wholes(fields, "shape")
    chunks = tuple(_chunk(chunk, name, dtype, shape) for chunk in _list(fields, "chunks"))
    if len(shape) > _MOST_DIMENSIONS or dtypes.nbytes(dtype, [size or 1 for size in shape]) > _LARGEST:
        raise MalformedIndexError(f"no tensor has the shape {brief(shape)}")
    return TensorEntry(dtype, shape, chunks)


def _chunk(value: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Chunk:
    fields = _as_object(value)
    return Chunk(
        file=_file_name(_text(fields, "file")),
        name=_text(fields, "name"),
        region=TensorRegion(name, dtype, shape, _wholes(fields, "offsets"), _wholes(fields, "sizes")),
        span=TensorByteSpan(_whole(fields, "start"), _whole(fields, "nbytes"), _sum_of(fields, "checksum")),
    )


def _check_filled(name: str, entry: TensorEntry) -> None:
    regions = [chunk.region for chunk in entry.chunks]
    for region, chunk in zip(regions, entry.chunks, strict=True):
        if not len(region.offsets) == len(region.sizes) == len(entry.shape):
            raise MalformedIndexError(f"a piece of {brief(name)} has another number of dimensions")
        ends = (offset + size for offset, size in zip(region.offsets, region.sizes, strict=True))
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise MalformedIndexError(f"a piece of {brief(name)} lies outside of it")
        if chunk.span.nbytes != region.nbytes:
            raise MalformedIndexError(f"a piece of {brief(name)} has the wrong number of bytes")
    distinct = len({region.offsets for region in regions})
    filled = sum(math.prod(region.sizes) for region in regions)
    if not regions or distinct != len(regions) or filled != math.prod(entry.shape):
        raise MalformedIndexError(f"the pieces of {brief(name)} do not fill it")


def _check_files_filled(index: CheckpointIndex) -> None:
    """Raise unless every byte of every file has exactly one checksum, so that all damage is detected."""
    spans: dict[str, list[TensorByteSpan]] = {name: [] for name in index.files}
    for entry in index.tensors.values():
        for chunk in entry.chunks:
            if chunk.file not in spans:
                raise MalformedIndexError(f"{chunk.file} is not among the files")
            spans[chunk.file].append(chunk.span)
    for name, record in index.files.items():
        position = record.header_nbytes
        for span in sorted(spans[name], key=lambda span: (span.start, span.nbytes)):
            if span.start != position:
                raise MalformedIndexError(f"the pieces in {name} do not fill it")
            position += span.nbytes
        if position != record.nbytes:
            raise MalformedIndexError(f"the pieces in {name} do not fill it")


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: JSON keeps only text as keys; use str({key!r})")
            _check_plain(inner, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            _check_plain(inner, f"{where}[{position}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; store it as a tensor or as plain numbers"
        )


def _object(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _as_object(_required(fields, key))


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedIndexError(f"{brief(value)} is not a JSON object")
    return value


def _list(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = _required(fields, key)
    if not isinstance(value, list):
        raise MalformedIndexError(f"{key} is {brief(value)}")
    return value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = _required(fields, key)
    if not isinstance(value, str):
        raise MalformedIndexError(f"{key} is {brief(value)}")
    return value


def _whole(fields: Mapping[str, Any], key: str) -> int:
    return _as_whole(_required(fields, key), key)


def _wholes(fields: Mapping[str, Any], key: str) -> tuple[int, ...]:
    return tuple(_as_whole(value, key) for value in _list(fields, key))


def _as_whole(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedIndexError(f"{key} is {brief(value)}")
    return value


def _sum_of(fields: Mapping[str, Any], key: str) -> str:
    value = _text(fields, key)
    if not _CHECKSUM.fullmatch(value):
        raise MalformedIndexError(f"{key} is {brief(value)}")
    return value


def _file_name(value: str) -> str:
    """Return a valid file name, never a path, so that no file outside the checkpoint is opened."""
    if not _FILE_NAME.fullmatch(value):
        raise MalformedIndexError(f"file name {brief(value)} is not that of a checkpoint")
    return value


def _required(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise MalformedIndexError(f"{key} is missing")
    return fields[key]
