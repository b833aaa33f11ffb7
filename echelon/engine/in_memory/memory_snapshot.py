"""``MemorySnapshot``: the newest complete in-memory snapshot on the hosts, read like a checkpoint.

A snapshot is a set of copies, one of every rank of the round that wrote it, all of the same step. The copy of a rank
is on its own host, or partly on the next host. Together the copies must hold every piece that any of them lists.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from echelon.base.errors import PeerLost
from echelon.base.formatting import things
from echelon.checkpoint import Stored, dtypes
from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.checkpoint.in_memory.snapshot_pieces import ELSEWHERE
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotClient, SnapshotRefusedError
from echelon.checkpoint.index import CheckpointIndex, Chunk, TensorEntry
from echelon.checkpoint.tensorfile import TensorByteSpan
from echelon.checkpoint.training_state import merged_facts
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import json_to_tensor, tensor_to_json
from echelon.distributed.tensor_region import TensorRegion

Copy = dict[str, Any]
#: A set as rank 0 broadcasts it: {"step", "world", "hosts", "facts", "tensors": {name: [dtype, shape, chunks]}}
SnapshotMetadata = dict[str, Any]


def newest(
    where: SnapshotHosts, at_least: int, group: dist.ProcessGroup | None, rank: int, skipped: int = 0
) -> MemorySnapshot | None:
    """Return the newest set, or None if it is of a step before ``at_least``. All ranks call it; rank 0 searches.

    skipped: number of newer sets to skip
    """
    found = _search(where, at_least, skipped) if rank == 0 else None
    with waiting("search for in-memory snapshots", "", group):
        metadata = _broadcast(found, group)
    return MemorySnapshot(metadata, where) if metadata is not None else None


class MemorySnapshot(Stored):
    """A set of copies. Every rank reads the pieces it needs from the host that has them."""

    def __init__(self, metadata: SnapshotMetadata, where: SnapshotHosts) -> None:
        self.path = Path("memory")
        self.hosts = int(metadata["hosts"])  #: number of hosts of the ranks that wrote it
        self._where = where
        tensors = {name: _entry(name, *entry) for name, entry in metadata["tensors"].items()}
        self._index = CheckpointIndex(int(metadata["step"]), int(metadata["world"]), {}, tensors, metadata["facts"])

    @property
    def title(self) -> str:
        return "memory"

    @property
    def origin(self) -> str:
        return f" (saved by {things(self.world_size, 'rank')} on {things(self.hosts, 'host')})"

    def _read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
        by_host: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_host.setdefault(int(chunk.file.split("/")[0]), []).append(chunk)
        for host, inside in by_host.items():
            try:
                with contextlib.closing(self._where.call(host)) as line:
                    for chunk in inside:
                        yield chunk, _fetch(line, chunk)
            except (OSError, SnapshotRefusedError) as error:
                raise PeerLost(
                    f"in-memory snapshots of host {self._where.hosts[host][0]} cannot be read: {error}; look at that "
                    "host"
                ) from None


def _fetch(line: SnapshotClient, chunk: Chunk) -> torch.Tensor:
    _, bank, seq = chunk.file.split("/")
    content = numpy.empty(chunk.span.nbytes, dtype=numpy.uint8)
    line.ask("read", bank=int(bank), seq=int(seq), start=chunk.span.start, bytes=chunk.span.nbytes)
    line.fill(content.data)
    return dtypes.tensor_of(content, chunk.region.dtype, chunk.region.sizes)


def _search(where: SnapshotHosts, at_least: int, skipped: int) -> SnapshotMetadata | None:
    """Return the newest complete set after skipping ``skipped``. A host that does not answer counts as empty."""
    sets: dict[tuple[int, int, int, int], dict[int, Copy]] = {}
    with contextlib.ExitStack() as stack:
        lines: dict[int, SnapshotClient] = {}
        for host in range(len(where.hosts)):
            with contextlib.suppress(OSError, SnapshotRefusedError):
                lines[host] = stack.enter_context(contextlib.closing(where.call(host)))
                found = lines[host].ask("list")["copies"]
                for copy in (copy for copy in found if copy["engine"] == where.engine):
                    key = copy["round"], copy["seq"], copy["step"], copy["world"]
                    ranks = sets.setdefault(key, {})
                    if copy["bytes"] >= ranks.get(copy["rank"], {"bytes": 0})["bytes"]:  # prefer its own host's
                        ranks[copy["rank"]] = {**copy, "host": host}
        for key in sorted(sets, reverse=True):  # the round counts first: a later one resumed from an earlier one
            ranks, (_, _, step, world) = sets[key], key
            if step < at_least or set(ranks) != set(range(world)):
                continue
            with contextlib.suppress(OSError, SnapshotRefusedError):
                if (metadata := _described(step, [ranks[rank] for rank in range(world)], lines)) is not None:
                    if not skipped:
                        return metadata
                    skipped -= 1
    return None


def _described(step: int, copies: list[Copy], lines: dict[int, SnapshotClient]) -> SnapshotMetadata | None:
    """Return the merged description of the copies; ``None`` if a piece is missing."""
    tensors: dict[str, list[Any]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    held: set[tuple[str, tuple[int, ...]]] = set()
    facts = []
    for copy in copies:
        described = lines[copy["host"]].ask("describe", bank=copy["bank"], seq=copy["seq"])
        facts.append(described["facts"])
        file = f"{copy['host']}/{copy['bank']}/{copy['seq']}"
        for name, dtype, shape, offsets, sizes, start in described["table"]:
            piece = name, tuple(offsets)
            held.add(piece)
            if start != ELSEWHERE and piece not in seen:
                seen.add(piece)
                tensors.setdefault(name, [dtype, shape, []])[2].append([file, offsets, sizes, start])
    if held - seen or not all(_filled(*entry) for entry in tensors.values()):
        return None
    merged = merged_facts([each["mine"] for each in facts], facts[0]["shared"])
    return {"step": step, "world": len(copies), "hosts": facts[0]["hosts"], "facts": merged, "tensors": tensors}


def _filled(_: str, shape: list[int], chunks: list[Any]) -> bool:
    return int(sum(math.prod(sizes) for _, _, sizes, _ in chunks)) == math.prod(shape)


def _entry(name: str, kind: str, shape: list[int], chunks: list[Any]) -> TensorEntry:
    result = []
    for file, offsets, sizes, start in chunks:
        region = TensorRegion.from_json([name, kind, shape, offsets, sizes])
        result.append(Chunk(file, name, region, TensorByteSpan(start, region.nbytes, "")))
    return TensorEntry(result[0].region.dtype, result[0].region.shape, tuple(result))


def _broadcast(message: SnapshotMetadata | None, group: dist.ProcessGroup | None) -> SnapshotMetadata | None:
    """Broadcast the message of rank 0 and return it."""
    if group is None:
        return message
    data = json_to_tensor(message)
    length = torch.tensor([data.numel()])
    dist.broadcast(length, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        data = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    metadata: SnapshotMetadata | None = tensor_to_json(data)
    return metadata
