"""Describe the operations of a step as text, in the order in which the engine runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.planner.cost.strategy_traffic import WHOLE_LAYER, RankCounts, local_steps, sharing_ranks
from echelon.strategy.parts import Amp, Dgc, Lamb, Lars, LocalSgd, LrScaling, ParameterServer, Recompute, Shard
from echelon.strategy.strategy_table import word

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy

Stage = tuple[str, str]


def stages(strategy: Strategy, job: RankCounts) -> Iterator[Stage]:
    """Yield (short name, description) of each operation of a step, first to last."""
    if strategy.part(ParameterServer):
        yield "pull", "the rows that the batch needs, each once; those of the next batch while this one computes"
    shard = strategy.part(Shard) if job.ranks > 1 else None
    if shard and shard.level == WHOLE_LAYER:
        yield (
            "fetch",
            "before a layer computes, forward and backward, its weights are gathered, and freed after it",
        )
    yield from _forward_and_backward(strategy)
    if shard and shard.level > 1:
        yield from _scatter(strategy, job)
    if strategy.gradient_merge > 1:
        yield "merge", f"gradients add up; what follows happens once in {strategy.gradient_merge} steps"
    if shard and shard.level == 1:
        yield from _scatter(strategy, job)
    servers = strategy.part(ParameterServer)
    if servers and servers.mode != "collective":
        yield from _server_stages(strategy, servers, job)
        return
    if job.ranks > 1 and local_steps(strategy):
        yield from _alone(strategy)
    elif strategy.dgc:
        yield from _compressed(strategy, job)
    else:
        yield from _together(strategy, job)
    yield from _update(strategy, job)
    if servers:
        yield "exchange", "gradients of the rows, to the workers that hold them, each row once"
        yield "apply", "their mean, in one update"


def _forward_and_backward(strategy: Strategy) -> Iterator[Stage]:
    amp, recompute = strategy.part(Amp), strategy.part(Recompute)
    if amp:
        yield "autocast", f"forward and loss compute in {amp.dtype} where that is safe"
    keeps = "; of a recomputed segment only the input is kept" if recompute else ""
    yield "forward", f"the model and its loss{keeps}{', in host memory' if recompute and recompute.offload else ''}"
    if scale := _scale(strategy):
        yield "scale", f"the loss is multiplied by {scale}"
    yield "backward", "each segment is computed again, then its gradients" if recompute else "gradients"


def _scale(strategy: Strategy) -> str | None:
    amp = strategy.part(Amp)
    if amp is None or amp.scaling is None:
        return None
    return f"the loss scale, {word(amp.init_scale)} at first" if amp.scaling == "dynamic" else f"{amp.scaling:g}"


def _op(strategy: Strategy) -> str:
    """Return ``sum`` or ``mean``, the reduction of gradients; "auto" counts as a mean, as the loss usually is one."""
    return "sum" if strategy.reduction.op == "sum" else "mean"


def _unscale(strategy: Strategy, who: str) -> Iterator[Stage]:
    if _scale(strategy):
        yield "unscale", f"gradients are divided by the scale; one that is not finite skips the step {who}"


def _scatter(strategy: Strategy, job: RankCounts) -> Iterator[Stage]:
    shard = strategy.part(Shard) or Shard()
    ranks = sharing_ranks(shard, job)
    what = f"{_op(strategy)} of gradients over {ranks} ranks, to each its rows"
    groups = f"; the rows are then summed across {job.ranks // ranks} groups" if ranks < job.ranks else ""
    yield "scatter", f"{what}, while backward still runs{groups}"


def _together(strategy: Strategy, job: RankCounts) -> Iterator[Stage]:
    if job.ranks > 1 and not strategy.shard:
        wire = f", travelling as {strategy.fp16_allreduce}" if strategy.fp16_allreduce else ""
        yield "reduce", f"{_op(strategy)} of gradients over {job.ranks} ranks{wire}, while backward still runs"
    yield from _unscale(strategy, "on every rank")
    if strategy.clip:
        yield "clip", f"all gradients together to a norm of at most {word(strategy.clip)}"


def _compressed(strategy: Strategy, job: RankCounts) -> Iterator[Stage]:
    dgc = strategy.part(Dgc) or Dgc()
    wire = f", values as {strategy.fp16_allreduce}" if strategy.fp16_allreduce else ""
    inside = "; larger ones are summed inside each host" if dgc.hierarchical else ""
    if job.ranks > 1:
        small = f"gradients with fewer than {dgc.min_size:,} entries over {job.ranks} ranks"
        yield "reduce", f"{_op(strategy)} of {small}{inside}"
    yield from _unscale(strategy, "on every rank")
    who, parts = ("host", job.hosts) if dgc.hierarchical else ("rank", job.ranks)
    if strategy.clip:
        yield "clip", f"each {who}'s own gradient to a norm of at most {word(strategy.clip)} / sqrt({parts})"
    begin = f", from step {dgc.rampup_begin_step} on" if dgc.rampup_begin_step else ""
    part = f"{100 * (1 - dgc.sparsity[-1]):.3g}%"
    yield "compress", f"momentum and residual take the gradient in; the largest {part} of entries leave{begin}"
    if parts > 1:
        yield "exchange", f"positions and values go from each {who} to all others{wire}: their {_op(strategy)}"
    if strategy.clip:
        yield "clip", f"the gradients that travelled whole to a norm of at most {word(strategy.clip)}"


def _server_stages(strategy: Strategy, servers: ParameterServer, job: RankCounts) -> Iterator[Stage]:
    if servers.dense_on_servers:
        yield from _unscale(strategy, "of this worker")
    if strategy.clip and servers.dense_on_servers:
        yield "clip", f"this worker's own dense gradients to a norm of at most {word(strategy.clip)}"
    if not servers.dense_on_servers:
        yield from _together(strategy, job)
        yield "update", f"{_optimizer(strategy)}, for the dense parameters"
    elif servers.mode == "geo":
        yield "update", f"{_optimizer(strategy)}, on this worker's own copies"
        yield "exchange", f"every {servers.k_steps} steps: changes / workers to the servers, their values back"
        return
    what = "gradients of the rows" if not servers.dense_on_servers else "gradients of parameters and rows"
    yield "push", f"{what} to the servers, each row once"
    yield (
        "apply",
        {
            "sync": "when all workers' are there: their mean, in one update",
            "async": "at once, as they come",
            "bounded": f"at once; a worker more than {servers.staleness} steps ahead of the slowest waits",
        }[servers.mode],
    )


def _alone(strategy: Strategy) -> Iterator[Stage]:
    yield from _unscale(strategy, "on this rank")
    if strategy.clip:
        yield "clip", f"this rank's own gradients to a norm of at most {word(strategy.clip)}"


def _update(strategy: Strategy, job: RankCounts) -> Iterator[Stage]:
    scaling, local = strategy.part(LrScaling), local_steps(strategy)
    if scaling:
        times = scaling.factor(job.ranks * strategy.gradient_merge)
        warmup = f", reached over {scaling.warmup_steps:,} steps" if scaling.warmup_steps else ""
        yield "rate", f"the learning rate x {word(times)}{warmup}"
    shard = strategy.part(Shard) if job.ranks > 1 else None
    rows = ", each rank its rows" if shard else ""
    where = " in host memory" if shard and shard.offload else ""
    yield "update", f"{_optimizer(strategy)}{rows}{where}"
    if shard and shard.level < WHOLE_LAYER:
        yield "gather", "the updated rows go to all ranks"
    if local and job.ranks > 1:
        k = f"{local.k_steps}" if isinstance(local, LocalSgd) else f"{local.init_k_steps} (1 to {local.max_k_steps})"
        outer = ", a Nesterov step along their change" if local.outer else ""
        momentum = " and optimizer state" if local.average_momentum else ""
        yield "average", f"every {k} updates: weights{momentum} of {job.ranks} ranks{outer}"


def _optimizer(strategy: Strategy) -> str:
    if strategy.part(Lars):
        return "LARS in place of the SGD given"
    if strategy.part(Lamb):
        return "LAMB in place of the Adam given"
    if strategy.low_memory:
        return "Adam with 8-bit moments, of each parameter as soon as its gradient is there, while backward runs"
    return (
        "SGD; of compressed gradients without its momentum, which they have" if strategy.dgc else "the optimizer given"
    )
