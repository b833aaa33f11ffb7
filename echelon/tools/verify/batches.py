"""Batches on disk, and the merging of the replicas' batches into a global batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.base.errors import DataError
from echelon.parallel.objective import count_samples
from echelon.parallel.pipeline.pipeline_runner import micro_batches

_STRUCTURE = "structure"


class WeightedBatch(NamedTuple):
    """A batch and its weight in the mean loss."""

    batch: Any
    weight: float


class WeightedBatches(NamedTuple):
    """The batches that one process computes in place of all replicas: the loss is the weighted sum over them."""

    pieces: tuple[WeightedBatch, ...]


# ---- on disk ----


def describe(batch: Any) -> tuple[Any, list[Tensor]]:
    """Return the batch as a JSON structure and the list of tensors that the structure refers to.

    Raises ``DataError`` for a value that is neither a tensor nor representable in JSON.
    """
    tensors: list[Tensor] = []
    return _described(batch, tensors), tensors


def _described(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _described(inner, tensors) for key, inner in value.items()}]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_described(inner, tensors) for inner in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise DataError(
        f"the batch holds a {type(value).__name__}, which verify cannot give to another process; it takes tensors, "
        "numbers and text in tuples, lists and dicts"
    )


def write_batch(path: Path, batch: Any) -> None:
    structure, tensors = describe(batch)
    plain = {str(i): tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
    save_file(plain, path, metadata={_STRUCTURE: json.dumps(structure)})


def read_batch(path: Path) -> Any:
    with safe_open(path, framework="pt") as stored:
        structure = json.loads(stored.metadata()[_STRUCTURE])
        tensors = {int(name): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    return rebuild_batch(structure, tensors)


def rebuild_batch(structure: Any, tensors: Mapping[int, Tensor]) -> Any:
    kind, inner = structure
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: rebuild_batch(value, tensors) for key, value in inner.items()}
    if kind == "value":
        return inner
    listed = [rebuild_batch(value, tensors) for value in inner]
    return listed if kind == "list" else tuple(listed)


# ---- merging ----


def merge_replica_batches(
    batches: Sequence[Any], counts: Sequence[float], *, apart: bool, micro: int = 1
) -> WeightedBatches:
    """Return the batches that one process computes in place of the batches of all replicas.

    The result is one batch with the rows of all replicas in order. If they do not fit into one batch (because of
    different lengths, say), the result has one weighted batch per replica.

    counts: samples that each replica's batch counts for
    apart:  True if the losses of the replicas are to be summed: the result has one batch per replica, each of weight 1
    micro:  number of micro-batches if layers that mix rows (batch norm) see micro-batches: the result then has one
            batch per micro-batch; default 1
    """
    if apart:
        return WeightedBatches(tuple(WeightedBatch(batch, 1.0) for batch in batches))
    total = sum(counts)
    if micro > 1:
        return _by_micro_batch(batches, [count / total for count in counts], micro)
    whole = concat_batches(batches)
    if whole is not None:
        return WeightedBatches((WeightedBatch(whole, 1.0),))
    return WeightedBatches(
        tuple(WeightedBatch(batch, count / total) for batch, count in zip(batches, counts, strict=True))
    )


def _by_micro_batch(batches: Sequence[Any], weights: Sequence[float], micro: int) -> WeightedBatches:
    """Merge the first micro-batches of all replicas, then the second micro-batches, and so on."""
    pieces: list[WeightedBatch] = []
    for parts in zip(*(micro_batches(batch, micro) for batch in batches), strict=True):
        real = [(part.batch, weight * part.part) for part, weight in zip(parts, weights, strict=True) if part.rows]
        whole = concat_batches([batch for batch, _ in real]) if real else None
        if whole is not None:
            pieces.append(WeightedBatch(whole, sum(weight for _, weight in real)))
        else:
            pieces += [WeightedBatch(batch, weight) for batch, weight in real]
    return WeightedBatches(tuple(pieces))


def are_same_batches(batches: Sequence[Any]) -> bool:
    """Return True if there are at least two batches and all of them are equal."""
    (shape, first), *others = (describe(batch) for batch in batches)
    return bool(others) and all(
        other == shape and all(torch.equal(a, b) for a, b in zip(first, leaves, strict=True))
        for other, leaves in others
    )


class _ApartError(Exception):
    """Raised if batches cannot be concatenated."""


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of all batches; None if they cannot be concatenated unambiguously."""
    if len(batches) == 1:
        return batches[0]
    try:
        return _joined(batches, [count_samples(batch) for batch in batches])
    except (_ApartError, DataError):  # DataError: no tensor in a batch has rows
        return None


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _ApartError
    if isinstance(first, Tensor):
        return _merged(values, rows)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _ApartError
        return {key: _joined([value[key] for value in values], rows) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined_list(values, rows))
    if any(value != first for value in values):
        raise _ApartError
    return first


def _joined_list(values: Sequence[Any], rows: Sequence[int]) -> Iterable[Any]:
    """Concatenate lists of strings or numbers with one item per row (such as file names); join other lists by item."""
    plain = not any(isinstance(inner, Tensor | Mapping | list | tuple) for value in values for inner in value)
    by_row = plain and all(len(value) == count for value, count in zip(values, rows, strict=True))
    if by_row and (any(value != values[0] for value in values) or any(isinstance(inner, str) for inner in values[0])):
        return (inner for value in values for inner in value)
    if any(len(value) != len(values[0]) for value in values):
        raise _ApartError
    return [_joined(column, rows) for column in zip(*values, strict=True)]


def _merged(tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    first = tensors[0]
    if any(t.shape[1:] != first.shape[1:] or t.dim() != first.dim() or t.dtype != first.dtype for t in tensors):
        raise _ApartError
    if first.dim() and all(tensor.shape[0] == count for tensor, count in zip(tensors, rows, strict=True)):
        return torch.cat(list(tensors))
    if any(not torch.equal(tensor, first) for tensor in tensors):
        raise _ApartError
    return first


def on_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
