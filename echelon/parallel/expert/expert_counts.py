"""Headcount: how many tokens every rank sends to every expert, and what follows from it alone.

One small message, the same on all ranks afterwards, settles everything: each expert's capacity, who stands before whom,
how many rows travel from where to where, and in which row of an expert's buffer each one lands. Positions are counted
over all ranks as if their tokens were one batch: those of rank 0, then those of rank 1, and so on; first choices of
all tokens before second choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.collectives import all_gather
from echelon.distributed.tensor_layout import Range
from echelon.nn.expert_gate import capacity


@dataclass(frozen=True)
class ExpertCounts:
    """lengths: [ranks, top, experts] on the host; tokens: of every rank; me: this rank's place among them."""

    lengths: Tensor
    tokens: tuple[int, ...]
    me: int
    factor: float

    @property
    def _room(self) -> int:
        _, top, experts = self.lengths.shape
        return capacity(self.factor, top, sum(self.tokens), experts)

    @property
    def room_left(self) -> Tensor:
        """[ranks, top, experts]: how much of the capacity is left where the queue of a choice and rank begins."""
        by_choice = self.lengths.transpose(0, 1)
        flat = by_choice.flatten(0, 1)
        ahead = (flat.cumsum(0) - flat).view_as(by_choice).transpose(0, 1)
        return (self._room - ahead).clamp_(min=0)

    @property
    def kept(self) -> Tensor:
        """[ranks, top, experts]: how many of a queue find room."""
        return self.room_left.minimum(self.lengths)

    @property
    def fractions(self) -> Tensor:
        """[experts]: the fraction of all tokens whose first choice each is."""
        return self.lengths[:, 0].sum(0).double() / max(sum(self.tokens), 1)


def count_expert_tokens(
    lengths: Tensor, tokens: int, factor: float, everyone: dist.ProcessGroup | None, *, me: int
) -> ExpertCounts:
    """Every rank's queue lengths, [top, experts], and number of tokens. Reading them waits for a GPU, once a layer."""
    message = torch.cat([lengths.flatten(), lengths.new_tensor([tokens])])
    rows = (message[None] if everyone is None else all_gather(message, everyone)).cpu()
    return ExpertCounts(rows[:, :-1].view(-1, *lengths.shape), tuple(rows[:, -1].tolist()), me, factor)


@dataclass(frozen=True)
class ExpertDispatch:
    """Rows from this rank to each of the axis and from each to this one; where those land, in buffers of ``width``."""

    sent: tuple[int, ...]
    came: tuple[int, ...]
    slots: Tensor
    width: int


def plan_dispatch(kept: Tensor, me: int, owned: list[Range]) -> ExpertDispatch:
    """From what the ranks of the axis keep, [ranks, top, experts]; rank i has the experts of ``owned[i]``.

    Rows leave in order of expert, then choice, then token: so they come as (rank, expert, choice).
    """
    sent = tuple(int(kept[me, :, begin:end].sum()) for begin, end in owned)
    mine = kept[:, :, slice(*owned[me])].permute(0, 2, 1)  # [ranks, experts here, top]
    by_expert = mine.transpose(0, 1).flatten(1)  # the queues of one expert, one after another
    width = int(by_expert.sum(1).max()) if by_expert.numel() else 0
    begins = by_expert.cumsum(1) - by_expert + width * torch.arange(len(by_expert))[:, None]
    begins = begins.view(mine.shape[1], mine.shape[0], mine.shape[2]).transpose(0, 1).flatten()
    counts = mine.flatten()
    came_before = counts.cumsum(0) - counts
    total = int(counts.sum())
    slots = (begins - came_before).repeat_interleave(counts, output_size=total) + torch.arange(total)
    return ExpertDispatch(sent, tuple(mine.sum((1, 2)).tolist()), slots, width)
