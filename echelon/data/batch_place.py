"""``BatchPlace``: the place of a batch in its epoch, by which a batch is named and left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Number of samples that a message names.
NAMED = 8


class BatchPlace(NamedTuple):
    """The place of a global batch.

    number: batches before it in the epoch
    start:  samples before it in the epoch's global order
    taken:  samples of that order in it
    """

    epoch: int
    number: int
    start: int
    taken: int

    @property
    def samples(self) -> tuple[int, int, int]:
        """The epoch and the samples of its order, which do not depend on earlier batches that were left out."""
        return self.epoch, self.start, self.taken

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.number}"


def numbers_text(indices: Sequence[int]) -> str:
    """Return a text with the first of these sample numbers."""
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"sample{'s' * (len(indices) != 1)} {', '.join(map(str, indices[:NAMED]))}{more}"
