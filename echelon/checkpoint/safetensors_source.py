"""``SafetensorsSource``: a ``WeightSource`` over the safetensors files of a model, one or many."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy
import torch

from echelon.base.errors import CheckpointError, Damaged
from echelon.checkpoint import dtypes
from echelon.checkpoint.safetensors_header import TensorPosition, open_for_reading, read_positions, read_weight_map
from echelon.distributed.tensor_region import TensorRegion, narrow

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Shorter runs of bytes are read together with what lies between them: a call for each would take longer.
_SHORT_RUN = 4096
_BLOCK = 8 << 20  # bytes that are read at once if runs are short
_NAMED = 3  # files that a message names


class SafetensorsSource:
    """Tensors of a safetensors file, or of a directory with ``model.safetensors`` or an index and many files.

    The constructor reads headers only. ``read`` reads the bytes of the region and no others; of regions whose rows are
    shorter than 4 KiB it reads the rows between as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0  #: bytes of tensors that were read so far
        self._files: dict[Path, int] = {}
        weakref.finalize(self, _close, self._files)
        self._positions: dict[str, tuple[Path, TensorPosition]] = {}
        for file, expected in _weight_files(self.path):
            found = read_positions(file, self._opened(file))
            if missing := sorted(set(expected) - set(found)):
                raise Damaged(
                    f"{file} does not hold '{missing[0]}' (and {len(missing) - 1} more) that the index of the model "
                    "names; copy or download the model again"
                )
            self._positions |= {name: (file, found[name]) for name in (expected or found)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(dtypes.nbytes(position.dtype, position.shape) for _, position in self._positions.values())

    def names(self) -> Collection[str]:
        return self._positions.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._position(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._position(name)[1].dtype

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        file, position = self._position(name)
        if position.shape != region.shape:
            raise CheckpointError(
                f"'{name}' is {list(position.shape)} in {file} and {list(region.shape)} in the model; "
                "give the weights of this model"
            )
        values = torch.empty(region.sizes, dtype=position.dtype, device="cpu")
        if values.numel():
            into = values.view(-1).view(torch.uint8).numpy()
            self._fill(into, file, position, region)
        return values

    def _fill(
        self, into: numpy.typing.NDArray[numpy.uint8], file: Path, position: TensorPosition, region: TensorRegion
    ) -> None:
        rows = _Rows(position, region)
        if rows.run >= _SHORT_RUN or rows.count == 1:
            for row, start in enumerate(rows.starts()):
                self._read(file, start, into[row * rows.run : (row + 1) * rows.run])
            return
        outer = _blocks(position, region)
        filled = 0
        for part in outer:  # whole rows of the first dimension: read together, then cut
            begin, count = part.offsets[0], part.sizes[0]
            stride = math.prod(position.shape[1:]) * position.dtype.itemsize
            raw = numpy.empty(count * stride, numpy.uint8)
            self._read(file, position.start + begin * stride, raw)
            whole = dtypes.tensor_of(raw, position.dtype, (count, *position.shape[1:]))
            chosen = dtypes.bytes_of(narrow(whole, (0, *part.offsets[1:]), part.sizes))
            into[filled : filled + chosen.nbytes] = chosen
            filled += chosen.nbytes

    def _read(self, file: Path, start: int, into: numpy.typing.NDArray[numpy.uint8]) -> None:
        at, handle = 0, self._opened(file)
        while at < into.nbytes:
            try:
                got = os.preadv(handle, [into.data[at:]], start + at)
            except OSError as error:
                raise Damaged(f"cannot read {file}: {error.strerror or error}; copy the model again") from None
            if got == 0:
                raise Damaged(f"{file} became shorter while it was read; copy or download the model again")
            at += got
        self.bytes_read += at

    def _opened(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = open_for_reading(file)
        return self._files[file]

    def _position(self, name: str) -> tuple[Path, TensorPosition]:
        if name not in self._positions:
            raise CheckpointError(
                f"{self.path} holds no tensor '{name}'; names() lists the {len(self._positions)} that it holds"
            )
        return self._positions[name]


def _close(files: dict[Path, int]) -> None:
    for handle in files.values():
        os.close(handle)


class _Rows:
    """The contiguous runs of bytes of a region in its tensor: ``count`` of ``run`` bytes each."""

    def __init__(self, position: TensorPosition, region: TensorRegion) -> None:
        shape, sizes = position.shape, region.sizes
        inner = len(shape)  # dimensions from here on are whole
        while inner and sizes[inner - 1] == shape[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)
        self._position, self._region, self._outer = position, region, outer
        self.run = math.prod(sizes[outer:]) * position.dtype.itemsize
        self.count = math.prod(sizes[:outer])

    def starts(self) -> Iterator[int]:
        """Yield the offset in the file of each run."""
        position, region, outer = self._position, self._region, self._outer
        strides = [math.prod(position.shape[dim + 1 :]) * position.dtype.itemsize for dim in range(len(position.shape))]
        base = position.start + sum(at * stride for at, stride in zip(region.offsets, strides, strict=True))
        for index in numpy.ndindex(*region.sizes[:outer]):
            yield base + sum(at * stride for at, stride in zip(index, strides[:outer], strict=True))


def _blocks(position: TensorPosition, region: TensorRegion) -> Iterator[TensorRegion]:
    """Yield the region in blocks of some megabytes of the file, cut along the first dimension."""
    stride = math.prod(position.shape[1:]) * position.dtype.itemsize
    step = max(1, _BLOCK // stride)
    for begin in range(0, region.sizes[0], step):
        sizes = (min(step, region.sizes[0] - begin), *region.sizes[1:])
        yield region._replace(offsets=(region.offsets[0] + begin, *region.offsets[1:]), sizes=sizes)


def _weight_files(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each file with the names that the index expects in it; without an index, no names."""
    if path.is_file():
        yield path, []
    elif (path / INDEX).is_file():
        by_file: dict[str, list[str]] = {}
        for name, file in read_weight_map(path / INDEX).items():
            by_file.setdefault(file, []).append(name)
        if missing := [file for file in sorted(by_file) if not (path / file).exists()]:
            others = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise Damaged(
                f"{path}: {len(missing)} of the {len(by_file)} files that {INDEX} names are missing: "
                f"{', '.join(missing[:_NAMED])}{others}; copy or download the model again"
            )
        for file in sorted(by_file):
            yield path / file, by_file[file]
    elif (path / SINGLE).is_file():
        yield path / SINGLE, []
    else:
        raise _no_weights(path)


def _no_weights(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(
            f"{path}: there is no such file or directory; give the directory of a downloaded model "
            "('hf download NAME --local-dir DIR' makes one)"
        )
    there = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in there):
        return Damaged(f"{path} has weight files, but {INDEX} is missing; copy or download the model again")
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        return CheckpointError(
            f"{path} has pickled weights only, which can run code and are not read; save the model with "
            "save_pretrained() of transformers, which writes safetensors"
        )
    if "adapter_model.safetensors" in there:
        return CheckpointError(f"{path} holds an adapter and no model; give the directory of its base model")
    return CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; give the directory of a model")
