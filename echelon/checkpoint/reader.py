"""``Stored``: a checkpoint on disk, read by any number of ranks, each without communication."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from echelon.base.errors import CheckpointError
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory import find
from echelon.checkpoint.index import Chunk, TensorEntry, read_index
from echelon.distributed.tensor_layout import Layout, Part
from echelon.distributed.tensor_region import TensorRegion, narrow

_NAMED = 3  # number of mismatched tensors that a message names


class Stored:
    """A complete checkpoint. The constructor verifies its index; each read verifies its tensors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._index = read_index(self.path)
        self._sound: set[str] = set()

    @property
    def step(self) -> int:
        return self._index.step

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote it."""
        return self._index.world_size

    @property
    def facts(self) -> dict[str, Any]:
        return self._index.facts

    @property
    def title(self) -> str:
        """The name of the checkpoint in messages."""
        return str(self.path)

    @property
    def origin(self) -> str:
        """Additional text about the checkpoint's origin for messages."""
        return ""

    def names(self) -> list[str]:
        return list(self._index.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._index.tensors

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._entry(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, on the CPU."""
        entry = self._entry(name)
        whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.load({name: whole})
        return whole

    def read_part(self, name: str, layout: Layout) -> torch.Tensor:
        """Return the part of a tensor that a layout describes, on the CPU."""
        part = torch.empty(layout.local_shape, dtype=self.dtype(name), device="cpu")
        self.load({name: Part(part, layout)})
        return part

    @torch.no_grad()
    def load(self, into: Mapping[str, torch.Tensor | Part]) -> None:
        """Fill the given tensors in place, DTensors and Parts with their local part; other stored tensors are not read.

        If a chunk is damaged, tensors read before it are already filled and must not be used.
        """
        self._refuse_misfits(into)
        parts = {name: value for name, value in into.items() if isinstance(value, Part)}
        self._load_parts(parts)
        self._load_planned({name: value for name, value in into.items() if not isinstance(value, Part)})

    def _load_parts(self, parts: Mapping[str, Part]) -> None:
        wanted: dict[Chunk, list[tuple[TensorRegion, torch.Tensor]]] = {}
        for name, part in parts.items():
            for region, view in part.regions(name):
                for chunk in self._entry(name).chunks:
                    if (common := region.intersection(chunk.region)) is not None:
                        wanted.setdefault(chunk, []).append((common, common.view_of(view, region.offsets)))
        for chunk, source in self._read(wanted):
            for common, target in wanted[chunk]:
                target.copy_(common.view_of(source, chunk.region.offsets))

    def _load_planned(self, into: Mapping[str, torch.Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), self._metadata(into), is_coordinator=True)
        plan = planner.create_local_plan()
        chunks = {(name, chunk.region.offsets): chunk for name in into for chunk in self._entry(name).chunks}
        items: dict[Chunk, list[ReadItem]] = {}
        for item in plan.items:
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            items.setdefault(chunks[key], []).append(item)
        for chunk, source in self._read(items):
            for item in items[chunk]:
                planner.resolve_tensor(item).detach().copy_(narrow(source, item.storage_offsets, item.lengths))

    def verify(self) -> None:
        """Read everything once and compare it with its checksums; raises ``Damaged``."""
        for name in self._index.files:
            with self._opened(name):
                pass  # verifies the header, and files without tensors, which the loop below does not open
        for _ in self._read(chunk for entry in self._index.tensors.values() for chunk in entry.chunks):
            pass

    def _read(self, chunks: Iterable[Chunk]) -> Iterable[tuple[Chunk, torch.Tensor]]:
        """Yield the chunks with their values, in the order of their positions on disk."""
        by_file: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            by_file.setdefault(chunk.file, []).append(chunk)
        for name, inside in by_file.items():
            with self._opened(name) as file:
                for chunk in sorted(inside, key=lambda chunk: chunk.span.start):
                    raw = tensorfile.read(file, self.path / name, chunk.name, chunk.span)
                    yield chunk, dtypes.tensor_of(raw, chunk.region.dtype, chunk.region.sizes)

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of the checkpoint. Its header is verified once, because tensors are often read one by one."""
        with tensorfile.open_tensor_file(self.path / name) as file:
            if name not in self._sound:
                tensorfile.check_whole(self.path / name, file, self._index.files[name])
                self._sound.add(name)
            yield file

    def _entry(self, name: str) -> TensorEntry:
        entry = self._index.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path} holds no tensor '{name}'; names() lists the {len(self.names())} that it holds"
            )
        return entry

    def _metadata(self, names: Iterable[str]) -> Metadata:
        return Metadata({name: _tensor_metadata(self._entry(name)) for name in names})

    def _refuse_misfits(self, into: Mapping[str, torch.Tensor | Part]) -> None:
        misfits = [line for name, tensor in into.items() if (line := self._misfit(name, tensor))]
        if misfits:
            named = ", ".join(misfits[:_NAMED])
            others = f" and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
            raise CheckpointError(
                f"{self.path} does not fit: of {len(into)} tensors {len(misfits)} differ: {named}{others}; "
                "it was saved from another model or with other options, use those or another checkpoint"
            )

    def _misfit(self, name: str, value: torch.Tensor | Part) -> str | None:
        entry = self._index.tensors.get(name)
        if entry is None:
            return f"'{name}' is not in it"
        tensor, shape = (value.tensor, value.layout.shape) if isinstance(value, Part) else (value, tuple(value.shape))
        dtypes.refuse_unstorable(name, tensor)
        if (entry.dtype, entry.shape) != (tensor.dtype, shape):
            stored, here = _words(entry.dtype, entry.shape), _words(tensor.dtype, shape)
            return f"'{name}' is {stored} there and {here} here"
        return None


def verify(path: str | os.PathLike[str]) -> None:
    """Raise unless every byte of the checkpoint (or of the newest in a directory) is as it was written."""
    Stored(find(path)).verify()


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    regions = [chunk.region for chunk in entry.chunks]
    chunks = [ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes)) for region in regions]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)


def _words(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{dtypes.name_of(dtype)} {list(shape)}"
