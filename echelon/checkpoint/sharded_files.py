"""Writes tensors as ``model.safetensors``, or as many files with an index, a rank a file, as the hub's libraries do.

All ranks walk through all tensors in one order. Each file has one writer, which receives the values; on the other
ranks a read sends what they hold and returns a tensor on ``meta``. So a rank holds one whole tensor at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.os_errors import cannot_write
from echelon.checkpoint.region_tensor import RegionTensor
from echelon.checkpoint.safetensors_source import INDEX, SINGLE
from echelon.checkpoint.tensorfile import TensorSlot

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def is_weight_file(name: str) -> bool:
    """Return True for the names of files that ``ShardedFiles`` writes."""
    return _WEIGHT_FILE.fullmatch(name) is not None


@dataclass(frozen=True)
class ShardedFiles:
    """The tensors of each file.

    tensors: tensors by name, in the order of the files
    dtype:   dtype in which floating-point tensors are written; None for their own
    limit:   largest size of a file in bytes; a larger tensor has a file of its own
    """

    tensors: Mapping[str, RegionTensor]
    dtype: torch.dtype | None
    limit: int

    def files(self) -> dict[str, list[str]]:
        """Return the names of the tensors in each file, by file name."""
        shares: list[list[str]] = [[]]
        room = self.limit
        for name in self.tensors:
            nbytes = self._nbytes(name)
            if shares[-1] and nbytes > room:
                shares.append([])
                room = self.limit
            shares[-1].append(name)
            room -= nbytes
        if len(shares) == 1:
            return {SINGLE: shares[0]}
        return {f"model-{i:05d}-of-{len(shares):05d}.safetensors": share for i, share in enumerate(shares, 1)}

    def write(self, folder: Path, rank: int, ranks: int, receive: Callable[[int], object]) -> None:
        """Write the files whose turn it is on this rank, and send the values that other ranks write.

        receive: called with the rank that the next values are for

        A failure is raised when all files are through: a rank that left earlier would keep the others waiting.
        """
        failure: CheckpointError | None = None
        for turn, (file, names) in enumerate(self.files().items()):
            writer = turn % ranks
            receive(writer)
            contents = self._contents(names)
            if writer == rank and failure is None:
                failure = self._write_file(folder / file, self._ordered(names), contents)
            for _ in contents:  # what is not written here is sent to its writer, or dropped
                pass
        if failure is not None:
            raise failure

    def write_index(self, folder: Path) -> None:
        """Write the index; a single file has none."""
        files = self.files()
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            total = sum(map(self._nbytes, self.tensors))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            tensorfile.write_whole(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())

    def refuse_unseen(self, folder: Path) -> None:
        """Raise if a file of another rank is not visible here."""
        for file in self.files():
            if not (folder / file).is_file():
                raise CheckpointError(
                    f"rank 0 does not see {folder / file}, which another rank wrote; choose a directory that all "
                    "hosts share"
                )

    def _write_file(self, path: Path, names: Sequence[str], contents: Iterator[memoryview]) -> CheckpointError | None:
        slots = [self._slot(name) for name in names]
        try:
            tensorfile.write(path, slots, contents, note={"format": "pt"})
        except OSError as error:
            return CheckpointError(cannot_write(path, error))
        return None

    def _contents(self, names: Sequence[str]) -> Iterator[memoryview]:
        for name in self._ordered(names):
            value = self.tensors[name].read_whole()
            yield memoryview(b"") if value.is_meta else dtypes.bytes_of(value.to(self._dtype(name)))

    def _ordered(self, names: Sequence[str]) -> list[str]:
        """Return names in the order of safetensors itself, in which every tensor is aligned to its dtype."""
        return sorted(names, key=lambda name: (-self._dtype(name).itemsize, name))

    def _slot(self, name: str) -> TensorSlot:
        dtype, shape = self._dtype(name), list(self.tensors[name].shape)
        return TensorSlot(name, *dtypes.exported_as(dtype, shape), dtypes.nbytes(dtype, shape))

    def _dtype(self, name: str) -> torch.dtype:
        own = self.tensors[name].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def _nbytes(self, name: str) -> int:
        return math.prod(self.tensors[name].shape) * self._dtype(name).itemsize
