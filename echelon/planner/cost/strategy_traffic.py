"""Formulas for the bytes that a rank sends in a step under a Strategy, and for the memory that the Strategy adds.

In an all-reduce of B bytes over N ranks, each rank sends 2 (N - 1) / N x B bytes, which is the minimum and what a ring
needs. Reduce-scatter and all-gather are its two halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.base.errors import UsageError
from echelon.parallel.data.compressor import count_sent_entries as entries_left
from echelon.parallel.low_memory.formats import BLOCK
from echelon.parallel.low_memory.state_placement import tensor_bytes
from echelon.strategy.parts import AdaptiveLocalSgd, Dgc, LocalSgd, ParameterServer, Shard

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy

WHOLE_LAYER = 3  # the level of sharding at which parameters are gathered only while their layer computes
LOW_MEMORY = sum(tensor_bytes(BLOCK)) / BLOCK  # bytes of low_memory's state per entry, beside the bf16 weight
RESIDUAL = 8  # bytes per entry of DGC's momentum and residual, both fp32


@dataclass(frozen=True)
class ParameterSize:
    """The size of one trained parameter: number of entries, and bytes per entry."""

    numel: int
    width: int = 4

    @property
    def bytes(self) -> int:
        return self.numel * self.width


@dataclass(frozen=True)
class RankCounts:
    ranks: int
    ranks_per_host: int

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host


def all_reduced(sizes: Sequence[ParameterSize], ranks: int, wire: bool = False) -> float:
    """Return the bytes that each rank sends to all-reduce tensors; ``wire``: True if they are sent in 16 bits."""
    total = sum(size.numel * min(size.width, 2 if wire else size.width) for size in sizes)
    return 2 * (ranks - 1) / ranks * total


def sent_bytes_per_step(
    strategy: Strategy, sizes: Sequence[ParameterSize], job: RankCounts, frozen: float = 0.0
) -> Iterator[tuple[str, float]]:
    """Yield the bytes per step that each rank sends, by description; an average if steps differ.

    frozen: bytes of parameters that are not trained
    """
    wire = strategy.fp16_allreduce is not None
    merge = strategy.gradient_merge
    local, dgc, shard = local_steps(strategy), strategy.part(Dgc), strategy.part(Shard)
    servers = strategy.part(ParameterServer)
    if servers and servers.mode != "collective":  # of whose dense parameters the lines below are true
        often = servers.k_steps if servers.mode == "geo" else 1
        if servers.dense_on_servers:
            yield "gradients, to servers", sum(size.numel * size.width for size in sizes) / often
        else:
            yield "gradients", all_reduced(sizes, job.ranks, wire)
        return
    if shard:
        yield from _sharded(shard, sizes, job, frozen, merge)
    elif local:
        yield "weights", all_reduced(sizes, job.ranks, wire) / (merge * usual_k(local))
    elif dgc:
        for what, amount in _compressed(dgc, [size for size in sizes if size.numel >= dgc.min_size], job, wire):
            yield what, amount / merge
        small = [size for size in sizes if size.numel < dgc.min_size]
        yield f"gradients under {dgc.min_size:,} entries", all_reduced(small, job.ranks, wire) / merge
    else:
        yield "gradients", all_reduced(sizes, job.ranks, wire) / merge


def sharing_ranks(shard: Shard, job: RankCounts) -> int:
    """Return the number of ranks that share the state, each of which is a replica here."""
    if shard.within is None:
        return job.ranks
    size = job.ranks_per_host if shard.within == "host" else shard.within
    if job.ranks % size:
        raise UsageError(f"Shard(within={shard.within!r}): {job.ranks} ranks cannot form groups of {size}")
    return size


def _sharded(
    shard: Shard, sizes: Sequence[ParameterSize], job: RankCounts, frozen: float, merge: int
) -> Iterator[tuple[str, float]]:
    """Yield the traffic of sharding.

    frozen: bytes of all frozen parameters
    """
    ranks = sharing_ranks(shard, job)
    half = all_reduced(sizes, ranks) / 2  # bytes to reduce-scatter or all-gather all trained parameters once
    times = 1 / (merge if shard.level == 1 else 1)
    yield "gradients, scattered", half * times
    if ranks < job.ranks:
        yield "rows of gradients, summed across groups", all_reduced(sizes, job.ranks // ranks) / ranks * times
    if shard.level == WHOLE_LAYER:
        yield "weights, gathered for forward and for backward", 2 * (half + (ranks - 1) / ranks * frozen)
    else:
        yield "weights, gathered after the update", half / merge


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes that a rank holds between two steps; ``state``: bytes of one optimizer state tensor of all weights."""

    parameters: float
    gradients: float
    state: float


def model_state_bytes(level: int, trained: float, frozen: float, ranks: int, merge: int) -> ModelStateBytes:
    """Return the model state of a rank at a sharding level (0: no sharding).

    Without gradient merging, level 1 frees full gradients during backward, as level 2 does.
    """
    part = trained / ranks
    keeps_gradients = level == 0 or (level == 1 and merge > 1)
    parameters = (trained + frozen) / (ranks if level == WHOLE_LAYER else 1)
    return ModelStateBytes(parameters, trained if keeps_gradients else part, part if level else trained)


def _compressed(dgc: Dgc, large: Sequence[ParameterSize], job: RankCounts, wire: bool) -> Iterator[tuple[str, float]]:
    position = 4 if sum(size.numel for size in large) < 2**31 else 8
    rows = sum(entries_left(size.numel, dgc.sparsity[-1]) for size in large) * (position + (2 if wire else 4))
    if not dgc.hierarchical:
        yield "largest gradient entries", rows * (job.ranks - 1)
        return
    yield "gradients inside the host", all_reduced(large, job.ranks_per_host)
    yield "largest entries between hosts, by one rank a host", rows * (job.hosts - 1)


def added_memory(
    strategy: Strategy, sizes: Sequence[ParameterSize], job: RankCounts
) -> Iterator[tuple[str, str, float]]:
    """Yield the memory that strategies add: name of the strategy, purpose, bytes."""
    local, dgc = local_steps(strategy), strategy.part(Dgc)
    weights, numbers = sum(size.bytes for size in sizes), sum(size.numel for size in sizes)
    if dgc:
        large = sum(size.numel for size in sizes if size.numel >= dgc.min_size)
        yield "dgc", "momentum and residual of what is compressed, in fp32", RESIDUAL * large
    if strategy.low_memory:
        yield (
            "low_memory",
            "remainders, moments and their scales, in all; gradients go one by one",
            LOW_MEMORY * numbers,
        )
    if job.ranks == 1:
        return
    if local:
        yield local_name(strategy), "the weights as they were at the last average", weights
        if local.outer:
            yield local_name(strategy), "the outer optimizer's momentum", weights
    elif strategy.fp16_allreduce:
        yield "fp16_allreduce", "16-bit copies that leave and arrive", 4 * sum(size.numel for size in sizes)


def local_steps(strategy: Strategy) -> LocalSgd | AdaptiveLocalSgd | None:
    return strategy.part(LocalSgd) or strategy.part(AdaptiveLocalSgd)


def local_name(strategy: Strategy) -> str:
    return "localsgd" if strategy.localsgd else "adaptive_localsgd"


def usual_k(local: LocalSgd | AdaptiveLocalSgd) -> int:
    """Return the number of updates between two averages; for adaptive local SGD, the initial number."""
    return local.k_steps if isinstance(local, LocalSgd) else local.init_k_steps
