"""Packed sequences: sequences of different lengths concatenated without padding between them.

Token-wise layers (linear layers, norms, MLPs) need no more than that; attention also gets the boundaries of the
sequences.
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

MULTIPLE = 128  #: the tokens of a batch are padded to a multiple of this, so that kernels see few shapes
STEP = 64  #: ``longest`` is rounded up to a multiple of this, for the same reason


class Bounds(NamedTuple):
    """Boundaries of the sequences in one row: sequence i is tokens offsets[i] to offsets[i + 1].

    offsets: [n + 1] int32
    longest: upper bound of the tokens of a sequence

    >>> bounds = echelon.nn.Bounds(torch.tensor([0, 3, 8], dtype=torch.int32), longest=5)
    """

    offsets: Tensor
    longest: int

    def owners(self, tokens: int) -> Tensor:
        """Return the index of the sequence of each of ``tokens`` tokens."""
        at = torch.arange(tokens, device=self.offsets.device, dtype=self.offsets.dtype)
        # Search offsets, not offsets[1:]: compiled for GPUs by torch 2.11, the search would begin at offsets[0] anyway.
        return torch.bucketize(at, self.offsets, right=True) - 1

    def places(self, tokens: int) -> Tensor:
        """Return the position of each of ``tokens`` tokens in its sequence, from 0."""
        at = torch.arange(tokens, device=self.offsets.device)
        return at - self.offsets[self.owners(tokens)]


class Packed(NamedTuple):
    """A batch of n sequences as one row of t tokens.

    lengths: [n] int32; the first field, because the samples of a batch are counted by its first tensor
    offsets: [m + 1] int32, m >= n: the start of each sequence and the end of the last. The row is padded after the n
             sequences; the padding counts as further sequences, which belong to no sample
    values:  [t, ...]: the tokens
    longest: upper bound of the tokens of a sequence: a number on the host, so that the host need not wait for a kernel

    >>> packed = echelon.nn.pack([torch.arange(3), torch.arange(5)])
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
        """Index of the first token of each sample, [n]; valid only for samples that have a token."""
        return self.offsets[: self.samples]

    def owners(self) -> Tensor:
        """Return the sample of each token, [t]; n or more for padding."""
        return self.bounds.owners(self.values.shape[0])

    def places(self) -> Tensor:
        """Return the position of each token in its sample, [t]; padding gets 0, which any embedding table has."""
        return torch.where(self.owners() < self.samples, self.bounds.places(self.values.shape[0]), 0)

    def unpack(self) -> list[Tensor]:
        """Return the sequences as a list. This synchronizes with the device."""
        return list(torch.split(self.values[: int(self.lengths.sum())], self.lengths.tolist()))


def pack(sequences: Sequence[Any], *, multiple: int = MULTIPLE, longest: int | None = None, fill: float = 0) -> Packed:
    """Concatenate sequences into one row, and pad it.

    sequences: tensors [length, ...], arrays or lists of numbers
    multiple:  number of tokens to whose multiple the row is padded; default 128
    longest:   upper bound of the tokens of a sequence; default: the longest one, rounded up to a multiple of 64
    fill:      value of the padding; default 0

    >>> packed = echelon.nn.pack([torch.arange(3), torch.arange(5)])
    """
    parts = [torch.as_tensor(sequence) for sequence in sequences]
    return pack_concatenated(
        torch.cat(parts), [len(part) for part in parts], multiple=multiple, longest=longest, fill=fill
    )


def pack_concatenated(
    values: Tensor, lengths: Sequence[int], *, multiple: int = MULTIPLE, longest: int | None = None, fill: float = 0
) -> Packed:
    """Pack sequences that are concatenated already, ``values`` [sum of lengths, ...]; otherwise like ``pack``."""
    bounds = bounds_of(lengths, multiple=multiple, longest=longest)
    whole = _filled(len(values), multiple)
    values = torch.cat([values, values.new_full((whole - len(values), *values.shape[1:]), fill)])
    return Packed(torch.tensor(lengths, dtype=torch.int32), bounds.offsets, values, bounds.longest)


def bounds_of(lengths: Sequence[int], *, multiple: int = MULTIPLE, longest: int | None = None) -> Bounds:
    """Return the bounds of sequences in a row that is padded to a multiple of ``multiple`` tokens.

    The number of bounds does not depend on the lengths themselves: the padding always counts as the largest number of
    sequences that it may need.
    """
    if multiple < 1:
        raise UsageError(f"multiple={multiple}: expected 1 or more")
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
    """Return the mean over samples of each sample's mean of ``each`` [t].

    each:    [t]: a number per token, such as its loss
    of:      the sequences
    counted: tokens to include, [t] bool; default all. A sample without included tokens contributes 0

    The result equals the loss of the padded batch, so the batch may be split in any way. It is the same in every run,
    because every token is weighted by itself and only integers are summed per sample.

    >>> packed = echelon.nn.pack([torch.arange(3), torch.arange(5)])
    >>> mean = echelon.nn.mean_over_samples(torch.rand(len(packed.values)), packed)
    """
    owners = of.owners()
    counted = (owners < of.samples) if counted is None else counted & (owners < of.samples)
    running = F.pad(counted.long().cumsum(0), (1, 0))[of.offsets]
    weights = 1 / (running[1:] - running[:-1]).clamp(min=1).to(each.dtype)
    weighed = torch.where(counted, each * weights[owners], torch.zeros_like(each))
    return weighed.sum() / of.samples
