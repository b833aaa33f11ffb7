"""Packing: rows of different length are concatenated without padding, together with their masked words.

A packed batch has the samples of the padded one, with the same masks, and gives the same loss.
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

ASKED_MULTIPLE = 64  #: the number of masked words is padded to a multiple of it
WORTH = 0.95  #: rows are packed by default if the fraction of non-padding tokens is below this


class PackedRows:
    """Masked or labelled rows as packed batches; implements ``echelon.data.batched.BatchedDataset``.

    A batch has tokens (packed), segments [t] and None in place of the mask. For masked rows there follow the positions
    of masked words [m] and the target (packed words, next-sentence labels [n]); for labelled rows the targets.
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
    is_label = labels != IGNORED
    places = (row.begins[:, None] + positions)[is_label]
    counts = is_label.sum(1).tolist()
    words = pack_concatenated(labels[is_label], counts, multiple=ASKED_MULTIPLE, longest=labels.shape[1], fill=IGNORED)
    places = pack_concatenated(places, counts, multiple=ASKED_MULTIPLE, longest=labels.shape[1]).values
    return row, segments, None, places, (words, follows)


def _unpadded(tokens: Tensor, segments: Tensor, mask: Tensor, multiple: int) -> tuple[Packed, Tensor]:
    inside, lengths, longest = mask.bool(), mask.sum(1).tolist(), tokens.shape[1]
    row = pack_concatenated(tokens[inside], lengths, multiple=multiple, longest=longest)
    return row, pack_concatenated(segments[inside], lengths, multiple=multiple, longest=longest).values


def packing(data: Data, request: Request, device: torch.device, *, planned: bool = False) -> Data:
    """Return ``data`` packed if ``pack`` is True; if it is None, pack on a GPU if enough of the rows is padding.

    planned: True if a plan partitions the model, in a way not known here

    Raises UsageError if ``pack`` is True and the data cannot be packed.
    """
    if "pack" not in request.values:
        return data
    requested: bool | None = request["pack"]
    if requested is False or (requested is None and device.type != "cuda"):
        return data
    if reason := _not_packed(data, request, planned):
        if requested:
            raise UsageError(f"--pack true: {reason}; leave it out")
        return data
    if isinstance(data.train, PackedDocuments):
        return data
    rows = data.train.rows
    mean = float(rows.used().mean())
    if requested is None and mean >= WORTH * rows.length:
        return data
    about = f"{data.about}; packed without padding: {mean:.0f} of {rows.length} tokens on average (--pack false: rows)"
    return replace(
        data,
        train=PackedRows(data.train),
        test=PackedRows(data.test) if isinstance(data.test, MaskedRows | LabelledRows) else data.test,
        about=about,
    )


def _not_packed(data: Data, request: Request, planned: bool) -> str:
    """Return the reason why the data cannot be packed; "" if it can."""
    for name in ("stages", "marks"):
        if request.get(name, 1) != 1:
            return f"a packed row is not cut for --{name}"
    if planned:
        return "auto may choose a plan that cuts rows, and packed rows cannot be cut"
    if request.task == "answer_span":
        return "padding takes part in the choice of an answer's span"
    if not isinstance(data.train, MaskedRows | LabelledRows | PackedDocuments):
        return "this data has no padding between its sequences"
    return ""
