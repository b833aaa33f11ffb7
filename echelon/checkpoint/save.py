"""``CheckpointSave``: one save, from the tensors of every rank to a complete checkpoint, in order of execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from echelon.base.directory_lock import lost_to
from echelon.base.errors import CheckpointError
from echelon.checkpoint import directory as layout
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory_lock import CHECKPOINTS
from echelon.checkpoint.index import CheckpointIndex, Chunk, MalformedIndexError, TensorEntry, plain_facts
from echelon.checkpoint.os_errors import cannot_write
from echelon.checkpoint.rank_agreement import SavePeers
from echelon.checkpoint.staging import StagingBuffers
from echelon.checkpoint.tensorfile import FileRecord, TensorByteSpan, TensorSlot
from echelon.checkpoint.write_plan import local_pieces
from echelon.checkpoint.write_plan_cache import WritePlanCache
from echelon.distributed.tensor_layout import Part
from echelon.distributed.tensor_region import TensorRegion

T = TypeVar("T")
Held = list[tuple[TensorRegion, torch.Tensor]]


class CheckpointSave:
    """The collective steps of one save: agree on shares, write them, rename the result to its final name."""

    def __init__(
        self, peers: SavePeers, allotment: WritePlanCache, directory: Path, step: int, keep: int | None
    ) -> None:
        self._peers = peers
        self._allotment = allotment
        self._directory = directory
        self._step = step
        self._keep = keep
        self._aside = layout.writing_path(directory, step)  # replaced by rank 0's path in ``share``
        self.final = layout.final_path(directory, step)
        self._facts: dict[str, Any] = {}
        self._held: Held = []
        self._share: Held = []
        self._failure: Exception | None = None

    def share(self, tensors: Mapping[str, torch.Tensor | Part], facts: dict[str, Any]) -> None:
        """Agree on which rank writes which pieces, and create the directory to write to."""

        def offer() -> dict[str, Any]:
            self._facts = plain_facts(facts)
            self._held = local_pieces(tensors)
            return {"step": self._step, "pieces": self._allotment.offer([piece for piece, _ in self._held])}

        shares, aside = self._peers.agree(self._doing, offer, self._allot)
        self._aside = self._directory / aside
        own = self._allotment.accept([piece for piece, _ in self._held], shares, self._peers.rank)
        self._share = [self._held[position] for position in own]
        self._share.sort(key=lambda held: -held[0].dtype.itemsize)  # so that each tensor is aligned to its dtype

    def stage(self, staging: StagingBuffers) -> None:
        """Copy this rank's share to host memory. A failure is raised in ``write``, where all ranks learn of it."""
        try:
            self._share = staging.copy(self._share)
        except RuntimeError as error:
            self._failure = error
        self._held = []  # drop the references to training's own tensors

    def write(self) -> None:
        """Write every share; when all are on disk, make the checkpoint complete."""
        try:
            self._peers.agree(self._doing, self._write_share, self._complete)
        except CheckpointError:
            if self._peers.rank == 0 and self._aside.exists():
                with suppress(OSError):  # the next save sweeps leftovers
                    layout.remove_tree(self._aside)
            raise
        finally:
            layout.under_way.discard(self._aside)

    @property
    def _doing(self) -> str:
        return f"saving step {self._step}"

    def _allot(self, offers: list[Any]) -> tuple[list[list[int]] | None, str]:
        for rank, offer in enumerate(offers):
            if offer["step"] != self._step:
                raise CheckpointError(
                    f"rank 0 saves step {self._step}, but rank {rank} step {offer['step']}; call save together"
                )
        self._refuse_lost_directory()
        shares = self._allotment.allot([offer["pieces"] for offer in offers])
        self._on_disk(lambda: layout.open_aside(self._directory, self._aside))
        return shares, self._aside.name

    def _write_share(self) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        pieces = [piece for piece, _ in self._share]
        slots = _slots(pieces)
        contents = (dtypes.bytes_of(tensor) for _, tensor in self._share)
        path = self._aside / layout.tensor_file(self._peers.rank)
        record, spans = self._on_disk(lambda: tensorfile.write(path, slots, contents))
        written = [
            [piece.to_json(), slot.name, asdict(span)] for piece, slot, span in zip(pieces, slots, spans, strict=True)
        ]
        return {"file": asdict(record), "written": written}

    def _complete(self, results: list[Any]) -> None:
        index = CheckpointIndex(
            step=self._step,
            world_size=self._peers.world_size,
            files={layout.tensor_file(rank): FileRecord(**result["file"]) for rank, result in enumerate(results)},
            tensors=_entries([result["written"] for result in results]),
            facts=self._facts,
        )
        self._refuse_incomplete(index)
        self._refuse_lost_directory()
        self._on_disk(lambda: self._publish(index))
        if self._keep is not None:
            self._prune(self._keep)

    def _publish(self, index: CheckpointIndex) -> None:
        tensorfile.write_whole(self._aside / layout.INDEX, index.to_bytes())
        layout.publish(self._aside, self._directory, self._step)

    def _prune(self, keep: int) -> None:
        try:
            layout.prune(self._directory, self._step, keep)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint is complete, but {error.filename or self._directory} could not be removed: "
                f"{error.strerror}; remove it by hand"
            ) from error

    def _refuse_lost_directory(self) -> None:
        if (reason := lost_to(self._directory, CHECKPOINTS)) is not None:
            raise CheckpointError(reason)

    def _refuse_incomplete(self, index: CheckpointIndex) -> None:
        try:
            index.check()
        except MalformedIndexError as error:
            raise CheckpointError(f"the tensors of the ranks do not fit together: {error}") from error
        for name, record in index.files.items():
            path = self._aside / name
            whole = path.is_file() and path.stat().st_size == record.nbytes
            if not whole and name == layout.tensor_file(self._peers.rank):
                raise CheckpointError(
                    f"{path} was changed while it was saved; let one job alone write into a directory"
                )
            if not whole:
                raise CheckpointError(
                    f"rank 0 does not see {path}, which another rank wrote; choose a directory that all hosts share"
                )

    def _on_disk(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as error:
            raise CheckpointError(cannot_write(self._aside, error, opened_elsewhere=self._peers.rank > 0)) from error


def _slots(pieces: Sequence[TensorRegion]) -> list[TensorSlot]:
    """Return the pieces as tensors of one file. A whole tensor keeps its name; a shard's name has its offsets."""
    slots: dict[str, TensorSlot] = {}
    for piece in pieces:
        name = piece.name
        if piece.sizes != piece.shape:
            name += "@" + ",".join(str(offset) for offset in piece.offsets)
        while name in slots:
            name += "'"
        slots[name] = TensorSlot(name, *dtypes.stored_as(piece.dtype, piece.sizes), piece.nbytes)
    return list(slots.values())


def _entries(written: Sequence[Sequence[Any]]) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    for rank, items in enumerate(written):
        for plain, name, span in items:
            region = TensorRegion.from_json(plain)
            chunk = Chunk(layout.tensor_file(rank), name, region, TensorByteSpan(**span))
            chunks.setdefault(region.name, []).append(chunk)
    return {
        name: TensorEntry(found[0].region.dtype, found[0].region.shape, tuple(found))
        for name, found in sorted(chunks.items())
    }
