"""Decides which rank writes which piece of a tensor, with the planner of torch.distributed.checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from echelon.base.errors import CheckpointError
from echelon.checkpoint import dtypes
from echelon.distributed.tensor_layout import Part, local_tensor
from echelon.distributed.tensor_region import TensorRegion


def local_pieces(tensors: Mapping[str, torch.Tensor | Part]) -> list[tuple[TensorRegion, torch.Tensor]]:
    """Return the boxes that this rank holds, each with its current values, not copied."""
    plain: dict[str, torch.Tensor] = {}
    held: list[tuple[TensorRegion, torch.Tensor]] = []
    for name, value in tensors.items():
        tensor = local_tensor(value)
        _refuse(name, tensor)
        if isinstance(value, Part) and not value.layout.is_whole:
            held += [(region, view.contiguous()) for region, view in value.regions(name)]
        else:
            plain[name] = tensor
    # a rank beyond the end of an unevenly sharded tensor holds an empty piece, which is not written
    return held + [(p, data) for p, data in _planned(plain) if math.prod(p.sizes) or not math.prod(p.shape)]


def _planned(tensors: dict[str, torch.Tensor]) -> list[tuple[TensorRegion, torch.Tensor]]:
    planner = _planner()
    with torch.no_grad():
        planner.set_up_planner(tensors)
        items = planner.create_local_plan().items
        return [(_piece(item), planner.resolve_data(item)) for item in items]  # type: ignore[misc]


def share_out(offers: Sequence[Sequence[TensorRegion]]) -> list[list[int]]:
    """Return for every rank the positions of the pieces that it writes."""
    _refuse_contradictions(offers)
    plans = [SavePlan([_write_item(piece) for piece in pieces]) for pieces in offers]
    try:
        shared, _ = _planner().create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"the tensors of the ranks do not fit together: {error}") from error
    chosen = [{(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items} for plan in shared]
    return [
        [position for position, piece in enumerate(pieces) if (piece.name, piece.offsets) in keys]
        for pieces, keys in zip(offers, chosen, strict=True)
    ]


def _refuse(name: str, tensor: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":
        raise CheckpointError(f"{name!r} cannot be the name of a stored tensor; give it another name")
    dtypes.refuse_unstorable(name, tensor)
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"'{name}' is a partial sum on every rank; reduce it before saving")


def _refuse_contradictions(offers: Sequence[Sequence[TensorRegion]]) -> None:
    """Raise if ranks disagree about a piece: the planner would take pieces of equal name and offset for copies."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, TensorRegion]] = {}
    for rank, pieces in enumerate(offers):
        for piece in pieces:
            owner, known = first.setdefault((piece.name, piece.offsets), (rank, piece))
            if piece != known:
                raise CheckpointError(
                    f"'{piece.name}' is {_words(known)} on rank {owner} but {_words(piece)} on rank {rank}; "
                    "give tensors that belong to one rank a name of their own"
                )


def _words(piece: TensorRegion) -> str:
    whole = f"{dtypes.name_of(piece.dtype)} {list(piece.shape)}"
    return whole if piece.sizes == piece.shape else f"{list(piece.sizes)} of {whole}"


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _piece(item: WriteItem) -> TensorRegion:
    data = item.tensor_data
    assert data is not None
    return TensorRegion(
        item.index.fqn,
        data.properties.dtype,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
    )


def _write_item(piece: TensorRegion) -> WriteItem:
    """Return the planner's item of a piece: a SHARD, because only for shards it checks that they fill a tensor."""
    offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.sizes)
    return WriteItem(
        index=MetadataIndex(piece.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.shape),
        ),
    )
