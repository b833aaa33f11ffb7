"""ExpertCounts: the number of tokens that every rank sends to every expert, and all that follows from it.

One small all-gather determines everything on all ranks: each expert's capacity, the order of tokens in its queue, the
number of rows sent between ranks, and the row of an expert's buffer for each token. Positions are counted over all
ranks as if their tokens were one batch: those of rank 0, then those of rank 1, and so on; first choices of all tokens
come before second choices.
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
    """Queue lengths of all experts on all ranks.

    lengths:  [ranks, top, experts], tokens in each queue; a CPU tensor
    tokens:   number of tokens of every rank
    me:       this rank's index among the ranks
    factor:   capacity factor
    """

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
        """The capacity left at the beginning of the queue of each rank and choice, [ranks, top, experts]."""
        by_choice = self.lengths.transpose(0, 1)
        flat = by_choice.flatten(0, 1)
        ahead = (flat.cumsum(0) - flat).view_as(by_choice).transpose(0, 1)
        return (self._room - ahead).clamp_(min=0)

    @property
    def kept(self) -> Tensor:
        """The number of tokens of each queue that fit into the capacity, [ranks, top, experts]."""
        return self.room_left.minimum(self.lengths)

    @property
    def fractions(self) -> Tensor:
        """The fraction of all tokens that have each expert as their first choice, [experts]."""
        return self.lengths[:, 0].sum(0).double() / max(sum(self.tokens), 1)


def count_expert_tokens(
    lengths: Tensor, tokens: int, factor: float, everyone: dist.ProcessGroup | None, *, me: int
) -> ExpertCounts:
    """Gather every rank's queue lengths, [top, experts], and number of tokens.

    Reading them on the host waits for the GPU, once per layer.
    """
    message = torch.cat([lengths.flatten(), lengths.new_tensor([tokens])])
    rows = (message[None] if everyone is None else all_gather(message, everyone)).cpu()
    return ExpertCounts(rows[:, :-1].view(-1, *lengths.shape), tuple(rows[:, -1].tolist()), me, factor)


@dataclass(frozen=True)
class ExpertDispatch:
    """The rows that this rank exchanges with the ranks of the axis.

    sent:     number of rows sent to each rank
    received: number of rows received from each rank
    slots:    position of each received row in the experts' buffers
    width:    rows of the buffer of each expert
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    slots: Tensor
    width: int


def plan_dispatch(kept: Tensor, me: int, owned: list[Range]) -> ExpertDispatch:
    """Return the dispatch for the kept tokens of the ranks of the axis, [ranks, top, experts].

    Rank i has the experts of ``owned[i]``. Rows are sent in order of expert, then choice, then token, so they arrive in
    order of rank, expert, choice.
    """
    sent = tuple(int(kept[me, :, begin:end].sum()) for begin, end in owned)
    local = kept[:, :, slice(*owned[me])].permute(0, 2, 1)  # [ranks, experts here, top]
    by_expert = local.transpose(0, 1).flatten(1)  # [experts here, ranks * top], the queues of each expert in a row
    width = int(by_expert.sum(1).max()) if by_expert.numel() else 0
    begins = by_expert.cumsum(1) - by_expert + width * torch.arange(len(by_expert))[:, None]
    begins = begins.view(local.shape[1], local.shape[0], local.shape[2]).transpose(0, 1).flatten()
    counts = local.flatten()
    came_before = counts.cumsum(0) - counts
    total = int(counts.sum())
    slots = (begins - came_before).repeat_interleave(counts, output_size=total) + torch.arange(total)
    return ExpertDispatch(sent, tuple(local.sum((1, 2)).tolist()), slots, width)
