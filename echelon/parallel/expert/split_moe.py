"""A mixture of experts split over ranks: each rank has some experts, and all-to-all sends tokens to them and back.

The results are those of one process on all tokens, including which tokens are dropped: see expert_counts.py. The gate's
weights are whole on every rank.

Shared batch: every rank routes its share of the tokens, so no work is done twice. The input is scattered into shares
(backward: all-gather), and the outputs are all-gathered (backward: own share). The gate's gradient, of one share only,
is all-reduced over the axis at once, and so equals that of the whole batch on every rank.

Spread mode: every rank routes its own tokens. The gate's gradient is that of this rank's tokens, and the engine reduces
it as it does for every whole parameter.

The auxiliary loss of all T tokens is A = c * E * sum_e f_e * P_e, with f_e the fraction of all tokens whose first
choice is e (no gradient) and P_e the mean probability over all. With p_re the mean over the n_r tokens of rank r,
P_e = sum_r (n_r / T) * p_re. The engine multiplies rank r's loss by n_r / T and sums over ranks: so rank r reports
A_r = c * E * sum_e f_e * p_re, with f of all ranks and p of its own. Then sum_r (n_r / T) * A_r = A and, as f is a
constant, the same holds for the gradients. Ranks that share a batch report one value: p is then the mean over their
common batch. The all-reduce over shares has the identity as its backward, because each share contributes to p once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.tensor_layout import Layout, Range
from echelon.nn.expert_gate import ExpertQueues, TokenRouting, balance, queue
from echelon.nn.moe import MoE
from echelon.parallel.data import batch_norm
from echelon.parallel.expert.expert_counts import ExpertCounts, ExpertDispatch, count_expert_tokens, plan_dispatch
from echelon.parallel.tensor.lazy_activation import whole
from echelon.parallel.tensor.mappings import gather_from_split, lower, move, reduce_from_split, scatter_to_split
from echelon.parallel.tensor.rng import rank_local_rng
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_collectives import split_all_reduce, split_all_to_all
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, ranges_of, require_gather
from echelon.strategy.annotations.marks import Split

STACKED = ("w1", "b1", "w2", "b2")


def moe_pieces(module: MoE, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    if mark.how != "auto":
        raise UnsplittableError(
            f"has split(how={mark.how!r}), but a mixture of experts is split by experts; leave how out"
        )
    if mark.sequence:
        raise UnsplittableError(
            "has split(sequence=True), but a mixture of experts has no layers to cut it for; leave it out"
        )
    require_gather(mark, "a mixture of experts")
    owned = ranges_of(module.experts, mark, axis)
    facts = {"axis": axis, "everyone": axis.group, "owned": owned}
    return [SplitSpec(module, SplitMoE, facts, {name: {0: (owned[axis.rank],)} for name in STACKED})]


def split_moe(module: MoE, axis: SplitAxis, mark: Split | None = None) -> dict[str, Layout]:
    """Split the layer in place, and return the layouts of its split parameters, by name inside the module."""
    (piece,) = moe_pieces(module, mark or Split(), axis)
    layouts = piece.layouts()
    for name, layout in layouts.items():
        parameter = module.get_parameter(name)
        if not layout.is_whole:
            parameter.data = layout.take(parameter.data)
        parameter.grad = None
    piece.change_class()
    return layouts


def count_together(module: MoE, everyone: dist.ProcessGroup) -> None:
    """Count capacity and load over ``everyone``: the ranks whose tokens together form the global batch.

    For a split layer these are the replicas times the split axis, because each rank routes its own share. For a layer
    that is whole on every rank, they are the ranks with their own batches.
    """
    if not isinstance(module, SplitMoE):
        split_moe(module, SplitAxis(None, 0, 1, batch_per_rank=True))
    assert isinstance(module, SplitMoE)
    type(module).everyone = everyone


class SplitMoE(MoE):
    axis: SplitAxis
    everyone: dist.ProcessGroup | None
    owned: list[Range]  #: the experts of every rank of the axis

    def forward(self, x: Any) -> Tensor:
        return super().forward(whole(x))

    def _mix(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.axis.batch_per_rank or self.axis.size == 1:
            return self._route(tokens, self.gate.weight)
        sizes = self.axis.sizes(len(tokens))
        weight = move(self.gate.weight, Tensor.detach, partial(split_all_reduce, axis=self.axis))
        mixed, uneven = self._route(scatter_to_split(tokens, 0, sizes, None, self.axis), weight)
        return gather_from_split(mixed, 0, sizes, None, self.axis), uneven

    def _route(self, tokens: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        with rank_local_rng(self.axis, tokens.device, wanted=self.training and (self.noise > 0 or self.random_second)):
            choice = self._choose(tokens, gate)
        counted = len(tokens)
        if batch_norm._idle:  # a stand-in batch takes part in collectives, but its tokens are not counted
            counted, choice = (
                0,
                TokenRouting(torch.full_like(choice.experts, self.experts), choice.weights, choice.probabilities),
            )
        queues = queue(choice.experts, self.experts)
        heads = count_expert_tokens(queues.lengths, counted, self.capacity, self.everyone, me=_place(self.everyone))
        return self._travel(tokens, choice, queues, heads), self._unevenness(choice, heads, counted)

    def _travel(self, tokens: Tensor, choice: TokenRouting, queues: ExpertQueues, heads: ExpertCounts) -> Tensor:
        left = heads.room_left[heads.me].to(tokens.device)
        left = torch.cat([left, left.new_zeros(len(left), 1)], 1)  # for tokens without an expert
        kept = queues.places < left.gather(1, choice.experts)
        there = plan_dispatch(heads.kept[self._members()], self.axis.rank, self.owned)
        order = torch.where(kept, choice.experts, self.experts).flatten().argsort(stable=True)[: sum(there.sent)]
        received = _exchange(lower(tokens).index_select(0, order % max(len(tokens), 1)), there, self.axis)
        back = _exchange(self._answers(received, there), there, self.axis, home=True)
        rows = back.new_zeros(kept.numel(), self.dim).index_copy_(0, order, back)
        return self._weigh(rows, kept, choice)

    def _answers(self, received: Tensor, there: ExpertDispatch) -> Tensor:
        """Apply this rank's experts to the received rows, and return the outputs in the same order."""
        slots = there.slots.to(received.device)
        here = len(self.w1)
        buffer = received.new_zeros(here * there.width, self.dim).index_copy_(0, slots, received)
        return self._compute(buffer.view(here, there.width, self.dim)).flatten(0, 1).index_select(0, slots)

    def _unevenness(self, choice: TokenRouting, heads: ExpertCounts, counted: int) -> Tensor:
        sums = choice.probabilities.sum(0) if counted else choice.probabilities.sum(0) * 0
        if not self.axis.batch_per_rank and self.axis.size > 1:
            sums = reduce_from_split(sums, None, self.axis)
            counted = sum(heads.tokens[i] for i in self._members())
        return balance(heads.fractions.to(sums), sums / max(counted, 1))

    def _members(self) -> list[int]:
        """Return the indices of the axis's ranks within the group ``everyone``."""
        if self.axis.group is None or self.everyone is None:
            return [_place(self.everyone)]
        ranks = dist.get_process_group_ranks(self.everyone)
        return [ranks.index(rank) for rank in dist.get_process_group_ranks(self.axis.group)]


def _place(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _exchange(rows: Tensor, there: ExpertDispatch, axis: SplitAxis, home: bool = False) -> Tensor:
    """Send rows to the ranks of their experts, or with ``home`` back to the ranks of their tokens."""
    sent, received = (there.received, there.sent) if home else (there.sent, there.received)
    forth = partial(split_all_to_all, cut=0, cut_sizes=sent, join=0, join_sizes=received, axis=axis)
    back = partial(split_all_to_all, cut=0, cut_sizes=received, join=0, join_sizes=sent, axis=axis)
    return move(rows, forth, back)
