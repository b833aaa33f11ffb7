"""The length of token rows, from the parameters of the model."""

from __future__ import annotations

from echelon.base.errors import UsageError
from echelon.zoo.entry import Request

LEAST_LENGTH = 8  #: smallest length of a row: three special tokens and a few words


def row_length(request: Request) -> int:
    length = int(request.get("max_seq_length", 128))
    if length < LEAST_LENGTH:
        raise UsageError(f"--max_seq_length {length} leaves no room for text; give {LEAST_LENGTH} or more")
    return length


def row_sizes(request: Request) -> tuple[int, int]:
    """Return the number of tokens of a row, and the largest number of its masked words."""
    length = row_length(request)
    most = int(request.get("max_predictions_per_seq", max(1, round(0.15 * length))))
    if most < 1:
        raise UsageError(f"--max_predictions_per_seq {most}: a row needs one masked word at least")
    return length, most
