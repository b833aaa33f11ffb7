"""Sequences of different length laid one after another, without padding between them.

What a model does token by token (linear layers, norms, MLPs) needs no more than that; attention is told where each
sequence begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.base.errors import UsageError

MULTIPLE = 128  #: tokens of a batch are filled up to a multiple of it, so that kernels meet few shapes
STEP = 64  #: ``longest`` is rounded up to a multiple of it, for the same reason


class Bounds(NamedTuple):
    """What attention needs to know of sequences in one row: sequence i is tokens offsets[i] to offsets[i + 1].

    longest: no sequence has more tokens
    """

    offsets: Tensor
    longest: int

    def owners(self, tokens: int) -> Tensor:
        """For each of ``tokens`` tokens, the number of its sequence."""
        at = torch.arange(tokens, device=self.offsets.device, dtype=self.offsets.dtype)
        # not of offsets[1:]: compiled for GPUs by torch 2.11, the search would begin at offsets[0] all the same
        return torch.bucketize(at, self.offsets, right=True) - 1

    def places(self, tokens: int) -> Tensor:
        """For each of ``tokens`` tokens, how many stand before it in its sequence."""
        at = torch.arange(tokens, device=self.offsets.device)
        return at - self.offsets[self.owners(tokens)]


class Packed(NamedTuple):
    """A batch of n sequences as one row of t tokens.

    lengths: [n] int32; first, since a batch is counted by its first tensor
    offsets: [m + 1] int32, m >= n: where each begins, and where the last ends. Behind the n sequences the row is filled
             up; what fills it counts as further sequences, which belong to no sample
    values:  [t, ...]
    longest: tokens of a sequence, at most: a number on the host, so that no kernel has to be waited for
    """

    lengths: Tensor
    offsets: Tensor
    values: Tensor
    longest: int

    @property
    def samples(self) -> int:
        return self.lengths.shape[0]

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.offsets, self.longest)

    @property
    def begins(self) -> Tensor:
        """[n]: the first token of each sample. Only for sequences that have one."""
        return self.offsets[: self.samples]

    def owners(self) -> Tensor:
        """[t]: whose token it is; n or more: nobody's."""
        return self.bounds.owners(self.values.shape[0])

    def places(self) -> Tensor:
        """[t]: positions, from 0 in every sample; 0 also where it is nobody's, so that any table has it."""
        return torch.where(self.owners() < self.samples, self.bounds.places(self.values.shape[0]), 0)

    def unpack(self) -> list[Tensor]:
        """The sequences. Waits for the device."""
        return list(torch.split(self.values[: int(self.lengths.sum())], self.lengths.tolist()))


def pack(sequences: Sequence[Any], *, multiple: int = MULTIPLE, longest: int | None = None, fill: float = 0) -> Packed:
    """Tensors [length, ...], arrays or lists of numbers as one row, filled up with ``fill`` to a multiple of
    ``multiple`` tokens."""
    parts = [torch.as_tensor(sequence) for sequence in sequences]
    return pack_concatenated(
        torch.cat(parts), [len(part) for part in parts], multiple=multiple, longest=longest, fill=fill
    )


def pack_concatenated(
    values: Tensor, lengths: Sequence[int], *, multiple: int = MULTIPLE, longest: int | None = None, fill: float = 0
) -> Packed:
    """As ``pack``, of sequences that lie one after another already: ``values`` [sum of lengths, ...]."""
    bounds = bounds_of(lengths, multiple=multiple, longest=longest)
    whole = _filled(len(values), multiple)
    values = torch.cat([values, values.new_full((whole - len(values), *values.shape[1:]), fill)])
    return Packed(torch.tensor(lengths, dtype=torch.int32), bounds.offsets, values, bounds.longest)


def bounds_of(lengths: Sequence[int], *, multiple: int = MULTIPLE, longest: int | None = None) -> Bounds:
    """Of sequences in a row that is filled up to ``multiple``. As many bounds for any lengths that are alike in number:
    the filling is as many sequences as it may need."""
    if multiple < 1:
        raise UsageError(f"multiple={multiple}: a row is filled up to a multiple of 1 or more")
    most = max(lengths, default=0)
    longest = max(-(-most // STEP), 1) * STEP if longest is None else longest
    if most > longest:
        raise UsageError(f"longest={longest}, but a sequence has {most} tokens; cut it, or raise longest")
    ends = list(accumulate(lengths, initial=0))
    whole = _filled(ends[-1], multiple)
    pieces = -(-multiple // longest)
    tail = [min(ends[-1] + longest * (piece + 1), whole) for piece in range(pieces)]
    return Bounds(torch.tensor([*ends, *tail], dtype=torch.int32), longest)


def holds_packed(batch: Any) -> bool:
    return any(isinstance(leaf, Packed) for leaf in tree_leaves(batch, is_leaf=lambda node: isinstance(node, Packed)))


def _filled(tokens: int, multiple: int) -> int:
    return max(-(-tokens // multiple), 1) * multiple


def mean_over_samples(each: Tensor, of: Packed, counted: Tensor | None = None) -> Tensor:
    """The mean over samples of each sample's mean of ``each`` [t], over the tokens that are ``counted`` [t] (bool; by
    default all). So a batch's loss is that of the padded batch, and may be cut in any way. A sample without any has 0.

    Every token is weighed, and nothing but integers is summed sample by sample: the same numbers in every run.
    """
    owners = of.owners()
    counted = (owners < of.samples) if counted is None else counted & (owners < of.samples)
    running = F.pad(counted.long().cumsum(0), (1, 0))[of.offsets]
    weights = 1 / (running[1:] - running[:-1]).clamp(min=1).to(each.dtype)
    weighed = torch.where(counted, each * weights[owners], torch.zeros_like(each))
    return weighed.sum() / of.samples
