"""Reads the header of a safetensors file that another program wrote, and believes nothing in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.base.errors import CheckpointError, Damaged
from echelon.base.json_head import PREFIX, MalformedHeadError, parse_object, read_length
from echelon.checkpoint import dtypes

_LONGEST = 100_000_000  # bytes of a header; the safetensors library has the same limit


class TensorPosition(NamedTuple):
    """A tensor in a file: its dtype, shape, and the offset of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def open_for_reading(path: Path) -> int:
    """Return the handle of a regular file. A link is followed: the cache of the hub consists of links."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing; copy or download the model again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is no regular file; give a safetensors file, or a directory of them")
    return handle


def read_positions(path: Path, handle: int) -> dict[str, TensorPosition]:
    """Return the positions of all tensors of an open file, by name. Raises ``Damaged`` unless the file is complete."""
    nbytes = os.fstat(handle).st_size
    try:
        length = read_length(os.pread(handle, PREFIX, 0), _LONGEST)
    except MalformedHeadError:
        raise _no_safetensors(path) from None
    if PREFIX + length > nbytes:
        raise _truncated(path, nbytes, PREFIX + length)
    try:
        fields = parse_object(os.pread(handle, length, PREFIX))
    except MalformedHeadError:
        raise _no_safetensors(path) from None
    fields.pop("__metadata__", None)
    data = PREFIX + length
    spans = {name: _position(path, name, field, data) for name, field in fields.items()}
    _check_spans(path, spans.values(), data, nbytes)
    return {name: position for name, (position, _) in spans.items()}


def _position(path: Path, name: str, field: Any, data: int) -> tuple[TensorPosition, int]:
    """Return the position of one tensor and the end of its bytes."""
    try:
        word, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
        sound = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or not isinstance(word, str):
        raise _no_safetensors(path)
    dtype = dtypes.read_as(word)
    if dtype is None:
        raise CheckpointError(f"{path}: '{name}' has the dtype {word[:20]}, which cannot be read; convert it first")
    if end - begin != dtypes.nbytes(dtype, shape):
        raise Damaged(f"{path} is damaged: '{name[:80]}' has {end - begin} bytes, which is not its size; {_AGAIN}")
    return TensorPosition(dtype, tuple(shape), data + begin), data + end


def _check_spans(path: Path, spans: Any, data: int, nbytes: int) -> None:
    """Raise unless the tensors lie one behind the other up to the end of the file."""
    at = data
    for position, end in sorted(spans, key=lambda span: (span[0].start, span[1])):
        if position.start != at:
            raise Damaged(f"{path} is damaged: its tensors overlap or have gaps; {_AGAIN}")
        at = end
    if at > nbytes:
        raise _truncated(path, nbytes, at)
    if at < nbytes:
        raise Damaged(f"{path} is damaged: {nbytes - at} bytes at its end belong to no tensor; {_AGAIN}")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor from a ``model.safetensors.index.json``."""
    try:
        plain: Mapping[str, Any] = parse_object(path.read_bytes())
        files = plain["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file not in ("", "..") for file in files.values())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    except (MalformedHeadError, KeyError, AttributeError):
        sound = False
    if not sound or not files:
        raise Damaged(f"{path} is no index of safetensors files: it has no 'weight_map' of file names; {_AGAIN}")
    return dict(files)


_AGAIN = "copy or download the model again"


def _truncated(path: Path, nbytes: int, expected: int) -> Damaged:
    return Damaged(f"{path} is truncated: {nbytes:,} bytes instead of {expected:,}; {_AGAIN}")


def _no_safetensors(path: Path) -> Damaged:
    return Damaged(f"{path} is no safetensors file: its header cannot be read; {_AGAIN}")
