"""Multi-head attention split by heads: each rank computes its own heads, and one all-reduce sums their outputs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Range
from echelon.parallel.tensor.lazy_activation import whole
from echelon.parallel.tensor.linear import PartialSumOutput
from echelon.parallel.tensor.mappings import reduce_from_split
from echelon.parallel.tensor.rng import rank_local_rng
from echelon.parallel.tensor.sharded_activation import ShardedActivation, take_in
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_collectives import gather
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, ranges_of, require_gather, widths
from echelon.strategy.annotations.marks import Split


class HeadParallelAttention(nn.MultiheadAttention):
    """Multi-head attention with this rank's heads.

    torch's own forward cannot be used, because it derives the width of a head from the width of the input.
    """

    axis: SplitAxis
    heads: Sizes
    leave: PartialSumOutput

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        if is_causal and attn_mask is None:
            raise UsageError("MultiheadAttention: is_causal is a hint about attn_mask; give the mask too")
        single = query.dim() == 2
        if single and self.axis.batch_per_rank:
            raise UsageError("split beside replicate: attention needs a batch dimension to join the devices' batches")
        (q, k, v), rows = self._projected(query, key, value, single)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, rows)
        context, weights = self._attention(q, k, v, mask, causal, need_weights)
        out = self._leave(context, rows, single)
        return out, self._shown(weights, rows, average_attn_weights, single) if weights is not None else None

    def _projected(self, query: Any, key: Any, value: Any, single: bool) -> tuple[list[Tensor], Sizes | None]:
        """Return query, key and value of this rank's heads, each batch x heads x length x width, and the rows."""
        entered: list[tuple[Tensor, Sizes | None]] = []
        for i, x in enumerate((query, key, value)):
            known = next((entered[j] for j, other in enumerate((query, key, value)[:i]) if other is x), None)
            entered.append(known or take_in(x, self.axis))
        if query is key is value and self.in_proj_weight is not None:
            projected = list(F.linear(entered[0][0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            weights, biases = self._projections()
            projected = [F.linear(x, w, b) for (x, _), w, b in zip(entered, weights, biases, strict=True)]
        return [self._by_heads(x[None] if single else x, single) for x in projected], entered[0][1]

    def _projections(self) -> tuple[Any, Any]:
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        return weights, (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)

    def _by_heads(self, x: Tensor, single: bool) -> Tensor:
        if not (self.batch_first or single):
            x = x.transpose(0, 1)
        return x.view(*x.shape[:2], self.heads[self.axis.rank], self.head_dim).transpose(1, 2)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        drop = self.dropout if self.training else 0.0
        with rank_local_rng(self.axis, q.device, wanted=drop > 0):
            if not need_weights and q.shape[1]:  # not all attention kernels of torch accept zero heads
                return F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal=causal), None
            scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), drop)
            return weights.to(v.dtype) @ v, weights if need_weights else None

    def _leave(self, context: Tensor, rows: Sizes | None, single: bool) -> Any:
        context = context.transpose(1, 2).flatten(2)
        if single:
            context = context[0]
        elif not self.batch_first:
            context = context.transpose(0, 1)
        return self.leave(F.linear(context, self.out_proj.weight), rows, self.out_proj.bias)

    def _shown(self, weights: Tensor, rows: Sizes | None, averaged: bool, single: bool) -> Any:
        """Return the attention weights of all heads, or their mean."""
        if averaged:
            shown: Any = reduce_from_split(weights.sum(1) / self.num_heads, rows, self.axis)
        else:
            shown = ShardedActivation(weights, 1, self.heads, self.axis, rows)
        return whole(shown)[0] if single else shown

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor, rows: Sizes | None) -> Tensor | None:
        """Combine both masks into one that is added to the scores of this rank's heads; None without masks."""
        parts = []
        if padding is not None:
            padding = padding if rows is None else gather(padding, 0, rows, self.axis)
            padding = padding[None] if padding.dim() == 1 else padding
            parts.append(_additive(padding, q.dtype)[:, None, None, :])
        if attn is not None:
            parts.append(self._own_heads(_additive(attn, q.dtype), rows))
        return sum(parts[1:], start=parts[0]) if parts else None

    def _own_heads(self, mask: Tensor, rows: Sizes | None) -> Tensor:
        if mask.dim() == 2:
            return mask
        if rows is not None:
            mask = gather(mask, 0, tuple(size * self.num_heads for size in rows), self.axis)
        begin = sum(self.heads[: self.axis.rank])
        return mask.reshape(-1, self.num_heads, *mask.shape[1:])[:, begin : begin + self.heads[self.axis.rank]]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)


def attention_pieces(module: nn.MultiheadAttention, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    if "forward" in module.__dict__ or type(module).forward is not nn.MultiheadAttention.forward:
        raise UnsplittableError("has a forward() of its own; only that of torch.nn.MultiheadAttention can be split")
    if mark.how != "auto":
        raise UnsplittableError(f'is split by heads; leave out how="{mark.how}"')
    require_gather(mark, "attention")
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsplittableError("has add_bias_kv or add_zero_attn, which split attention does not support")
    if (mark.sequence or axis.batch_per_rank) and not module.batch_first:
        raise UnsplittableError("has batch_first=False, but this split joins or cuts batch x sequence x features")
    heads = ranges_of(module.num_heads, mark, axis)
    begin, end = (head * module.head_dim for head in heads[axis.rank])
    facts = {"axis": axis, "heads": widths(heads), "leave": PartialSumOutput(mark, axis)}
    partial = ("out_proj.bias",) if mark.sequence and module.out_proj.bias is not None else ()
    return [SplitSpec(module, HeadParallelAttention, facts, _attention_cuts(module.embed_dim, (begin, end)), partial)]


def _attention_cuts(width: int, local: Range) -> dict[str, dict[int, tuple[Range, ...]]]:
    begin, end = local
    three = {0: tuple((begin + at, end + at) for at in (0, width, 2 * width))}
    one: dict[int, tuple[Range, ...]] = {0: (local,)}
    separate = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), one)
    return {"in_proj_weight": three, "in_proj_bias": three, **separate, "out_proj.weight": {1: (local,)}}
