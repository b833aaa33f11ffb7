"""Embeddings split over the vocabulary, or by columns.

Over the vocabulary, each rank looks up the tokens that it holds and returns zeros for others, and the results are
summed over ranks. By columns, each rank holds some features of every token, and nothing is summed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.parallel.tensor.linear import PartialSumOutput
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_collectives import gather, gather_rows
from echelon.parallel.tensor.split_spec import (
    SplitSpec,
    UnsplittableError,
    ranges_of,
    require_gather,
    require_own_forward,
    widths,
)
from echelon.strategy.annotations.marks import Split


class VocabParallelEmbedding(nn.Embedding):
    axis: SplitAxis
    begin: int
    end: int
    leave: PartialSumOutput

    def forward(self, tokens: Tensor) -> Any:
        tokens, rows = _everyones(tokens, self.axis)
        return self.leave(self._look_up(tokens), rows, None)

    def _look_up(self, tokens: Tensor) -> Tensor:
        here = (tokens >= self.begin) & (tokens < self.end)
        if self.begin == self.end:  # this rank holds no tokens, but its empty weight must still get a gradient
            return self.weight.new_zeros(*tokens.shape, self.embedding_dim) + self.weight.sum()
        if self.sparse:  # look up only tokens of this rank, or the gradient would have rows that no token uses
            result = self.weight.new_zeros(*tokens.shape, self.embedding_dim)
            return result.index_put((here,), self._rows(tokens[here] - self.begin))
        # Invalid tokens stay out of range, so that torch raises its usual error.
        elsewhere = ~here & (tokens >= 0) & (tokens < self.num_embeddings)
        result = self._rows((tokens - self.begin).masked_fill(elsewhere, 0))
        return result.masked_fill(~here[..., None], 0)

    def _rows(self, local: Tensor) -> Tensor:
        padding = self.padding_idx
        is_local = padding is not None and self.begin <= padding < self.end
        return F.embedding(
            local, self.weight, padding - self.begin if is_local and padding is not None else None, sparse=self.sparse
        )


class ColumnParallelEmbedding(nn.Embedding):
    axis: SplitAxis
    sizes: Sizes
    gather: bool

    def forward(self, tokens: Tensor) -> Any:
        tokens, rows = _everyones(tokens, self.axis)
        local = F.embedding(tokens, self.weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)
        return ShardedActivation(local, -1, self.sizes, self.axis, rows) if self.gather else local


def _everyones(tokens: Tensor, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    if not axis.batch_per_rank:
        return tokens, None
    rows = gather_rows(tokens, axis)
    axis.memory.rows = rows
    return gather(tokens, 0, rows, axis), rows


def embedding_pieces(module: nn.Embedding, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    require_own_forward(module, nn.Embedding)
    if module.max_norm is not None:
        raise UnsplittableError("has max_norm, which changes rows while they are looked up; normalize them yourself")
    if mark.how == "column":
        ranges = ranges_of(module.embedding_dim, mark, axis)
        facts: dict[str, Any] = {"axis": axis, "sizes": widths(ranges), "gather": mark.gather}
        return [SplitSpec(module, ColumnParallelEmbedding, facts, {"weight": {1: (ranges[axis.rank],)}})]
    require_gather(mark, "an embedding split over its vocabulary")
    if module.scale_grad_by_freq:
        raise UnsplittableError(
            'has scale_grad_by_freq, which cannot be split over the vocabulary; use split(how="column")'
        )
    begin, end = ranges_of(module.num_embeddings, mark, axis)[axis.rank]
    facts = {"axis": axis, "begin": begin, "end": end, "leave": PartialSumOutput(mark, axis)}
    return [SplitSpec(module, VocabParallelEmbedding, facts, {"weight": {0: ((begin, end),)}})]
