"""Rows of different length without their padding: one after another, with the words asked for beside them.

A packed batch holds the samples of the padded one, with the same masks, and gives the same loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.data.order import Indices
from echelon.data.seeding import Seeds
from echelon.nn.packed import MULTIPLE, Packed, pack_concatenated
from echelon.zoo.datasets.tokens.documents import PackedDocuments
from echelon.zoo.datasets.tokens.masking import MaskedRows
from echelon.zoo.datasets.tokens.token_rows import LabelledRows
from echelon.zoo.entry import Data, Request
from echelon.zoo.tasks import IGNORED

ASKED_MULTIPLE = 64  #: words asked for are filled up to a multiple of it
WORTH = 0.95  #: packed by default where rows are used less than this


class PackedRows:
    """Rows, masked or labelled, as packed batches: what ``echelon.data.batched.BatchedDataset`` asks for.

    tokens (packed), segments [t], no mask, then what the task has: of masked words the places in the row [m] and,
    packed, the words; and a target of each sample [n].
    """

    def __init__(self, rows: MaskedRows | LabelledRows, multiple: int = MULTIPLE) -> None:
        self.padded, self._multiple = rows, multiple
        self._pack = _masked if isinstance(rows, MaskedRows) else _labelled

    def __len__(self) -> int:
        return len(self.padded)

    def __getitem__(self, index: int) -> Any:
        return self.padded[index]

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[Any, ...]:
        return self._pack(self.padded.batch(indices, seeds), self._multiple)


def _labelled(batch: tuple[Any, ...], multiple: int) -> tuple[Any, ...]:
    tokens, segments, mask, target = batch
    return (*_unpadded(tokens, segments, mask, multiple), None, target)


def _masked(batch: tuple[Any, ...], multiple: int) -> tuple[Any, ...]:
    tokens, segments, mask, positions, (labels, follows) = batch
    row, segments = _unpadded(tokens, segments, mask, multiple)
    asked = labels != IGNORED
    places = (row.begins[:, None] + positions)[asked]
    counts = asked.sum(1).tolist()
    words = pack_concatenated(labels[asked], counts, multiple=ASKED_MULTIPLE, longest=labels.shape[1], fill=IGNORED)
    places = pack_concatenated(places, counts, multiple=ASKED_MULTIPLE, longest=labels.shape[1]).values
    return row, segments, None, places, (words, follows)


def _unpadded(tokens: Tensor, segments: Tensor, mask: Tensor, multiple: int) -> tuple[Packed, Tensor]:
    inside, lengths, longest = mask.bool(), mask.sum(1).tolist(), tokens.shape[1]
    row = pack_concatenated(tokens[inside], lengths, multiple=multiple, longest=longest)
    return row, pack_concatenated(segments[inside], lengths, multiple=multiple, longest=longest).values


def packing(data: Data, request: Request, device: torch.device, *, planned: bool = False) -> Data:
    """``data`` packed, where ``pack`` says so; where nothing is said, on a GPU if enough of the rows is padding.

    planned: a plan that is found or given cuts the model, nobody knows how
    """
    if "pack" not in request.values:
        return data
    asked: bool | None = request["pack"]
    if asked is False or (asked is None and device.type != "cuda"):
        return data
    if reason := _not_packed(data, request, planned):
        if asked:
            raise UsageError(f"--pack true: {reason}; leave it out")
        return data
    if isinstance(data.train, PackedDocuments):
        return data
    rows = data.train.rows
    mean = float(rows.used().mean())
    if asked is None and mean >= WORTH * rows.length:
        return data
    about = f"{data.about}; packed without padding: {mean:.0f} of {rows.length} tokens on average (--pack false: rows)"
    return replace(
        data,
        train=PackedRows(data.train),
        test=PackedRows(data.test) if isinstance(data.test, MaskedRows | LabelledRows) else data.test,
        about=about,
    )


def _not_packed(data: Data, request: Request, planned: bool) -> str:
    """Why it cannot be done; empty where it can."""
    for name in ("stages", "marks"):
        if request.get(name, 1) != 1:
            return f"a packed row is not cut for --{name}"
    if planned:
        return "a plan that is found may cut what cannot be cut in a packed row"
    if request.task == "answer_span":
        return "padding takes part in the choice of an answer's span"
    if not isinstance(data.train, MaskedRows | LabelledRows | PackedDocuments):
        return "this data has no padding between its sequences"
    return ""
