"""Implement ``strategy.explain()``: options, order of a step, effects on numerics, traffic, and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.base.errors import UsageError, first_line
from echelon.base.formatting import size, text_table, things
from echelon.planner.cost import strategy_traffic
from echelon.planner.cost.strategy_traffic import ParameterSize, RankCounts
from echelon.strategy.combine import CombinationChange, active_names, verdicts
from echelon.strategy.lora import Lora
from echelon.strategy.parts import AdaptiveLocalSgd, Amp, Dgc, LocalSgd, Recompute, Shard
from echelon.strategy.strategy_table import table
from echelon.tools.explain import step_order

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy

#: (kind, effect) of each option, compared with one process that trains on the same batches without it; see LEGEND.
EFFECTS: dict[str, tuple[str, str]] = {
    "amp": ("approximate", "16-bit products in forward and backward; weights and optimizer stay as they are"),
    "recompute": ("exact", "less memory for one more forward pass; dropout repeats itself"),
    "lars": ("optimizer", "needs SGD: each layer's rate by |weight| / |gradient|"),
    "lamb": ("optimizer", "needs Adam or AdamW: each layer's step by |weight| / |step|"),
    "dgc": ("approximate", "needs SGD: small gradient entries arrive later, when they have grown"),
    "localsgd": ("approximate", "replicas differ between two averages"),
    "adaptive_localsgd": ("approximate", "replicas differ between two averages, less and less long"),
    "shard": ("exact", "replicas share out the state of one process: less memory, the same numbers"),
    "ps=sync": ("exact", "parameters and tables live on servers, which take the mean of all workers' gradients"),
    "ps=async": ("approximate", "every gradient is applied on arrival, to weights that others have updated"),
    "ps=bounded": ("approximate", "as async, but no worker runs further ahead than the bound"),
    "ps=geo": ("approximate", "workers differ between two exchanges of their changes"),
    "ps=collective": ("exact", "tables live in the workers, which update each row once with all workers' gradients"),
    "low_memory": ("approximate", "needs Adam or AdamW: weights are seen in bf16 and kept in fp32, moments in 8 bits"),
    "lora": ("optimizer", "low-rank adapters are trained, and the weights of the model are frozen"),
    "gradient_merge": ("exact", "one update of a batch so many times as large (batch norm sees one part at a time)"),
    "fp16_allreduce": ("approximate", "gradients are rounded to 16 bits when they are sent"),
    "clip": ("optimizer", "gradients above the norm are scaled down to it"),
    "lr_scaling": ("optimizer", "a larger rate for the larger batch"),
    "sync_batch_norm": ("exact", "batch-norm statistics over all replicas, as one process has them"),
    "sync_batch_norm=False": ("approximate", "batch-norm statistics of each replica for itself"),
    "reduction.op=sum": ("optimizer", "gradients grow with the number of ranks"),
    "split": ("exact", "each split layer is computed in parts, whose sums are added in another order"),
    "stages": ("exact", "the micro-batches of one process, each stage on its own rank"),
    "auto": ("exact", "the quickest plan that fits is found, with the first batch; see 'echelon plan'"),
}

LEGEND = {
    "exact": "the numbers of one process on the same batches",
    "approximate": "close to the numbers of one process",
    "optimizer": "another update, on purpose; the same in one process",
}

#: Without a model, figures are computed for one large fp32 tensor and shown per element.
NOMINAL = ParameterSize(2**30)


def explain(
    strategy: Strategy,
    model: nn.Module | None = None,
    *,
    ranks: int = 2,
    ranks_per_host: int | None = None,
    sample: Any = None,
) -> str:
    """See ``Strategy.explain``."""
    job = _job(ranks, ranks_per_host)
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"explain() takes a torch.nn.Module as model, got {type(model).__name__}")
    if sample is not None and model is None:
        raise UsageError("explain(sample=...) measures a model on it; give the model too")
    if model is not None and (lora := strategy.part(Lora)) is not None:
        from echelon.parallel.lora.adapt import adapted_copy

        model = adapted_copy(model, lora)
    sections = {
        f"Strategy on {_job_in_words(job)}": table(strategy).splitlines(),
        "One step, in order": _order(strategy, job),
        "What each changes": _effects(strategy),
        "Together": _changes(strategy, model, job),
        "Sent by each rank in a step": _sent(strategy, model, job),
        "Memory on each rank": _memory(strategy, model, job, sample),
    }
    shown = [f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items() if lines]
    return "\n\n".join(shown)


def _job(ranks: int, ranks_per_host: int | None) -> RankCounts:
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: expected 1 or more")
    each = ranks if ranks_per_host is None else ranks_per_host
    if each < 1 or ranks % each:
        raise UsageError(f"ranks_per_host={each}: expected a number that divides ranks={ranks}")
    return RankCounts(ranks, each)


def _job_in_words(job: RankCounts) -> str:
    hosts = f", {job.ranks_per_host} on each of {job.hosts} hosts" if job.hosts > 1 else ""
    return f"{things(job.ranks, 'rank')}{hosts}"


def _order(strategy: Strategy, job: RankCounts) -> list[str]:
    numbered = [(f"{i:2} {name}", text) for i, (name, text) in enumerate(step_order.stages(strategy, job), start=1)]
    return text_table(numbered)


def _effects(strategy: Strategy) -> list[str]:
    # the effect of parameter servers depends on their mode alone, so "ps" is enough as a heading
    named = {name: "ps" if name.startswith("ps=") else name for name in active_names(strategy) if name in EFFECTS}
    rows = [(shown, *EFFECTS[name]) for name, shown in named.items()]
    if not rows:
        return ["nothing: losses and weights are those of one process on the global batch"]
    kinds = [f"({kind}: {meaning})" for kind, meaning in LEGEND.items() if any(kind == row[1] for row in rows)]
    return text_table(rows) + kinds


def _changes(strategy: Strategy, model: nn.Module | None, job: RankCounts) -> list[str]:
    implied = ["sync_batch_norm"] if model is not None and _shared_batch_norms(strategy, model, job) else []
    result = [
        (pair, verdict) for pair, verdict in verdicts(strategy, implied) if isinstance(verdict, CombinationChange)
    ]
    return [f"{first} + {second}: {verdict.how}" for (first, second), verdict in result]


def _sent(strategy: Strategy, model: nn.Module | None, job: RankCounts) -> list[str]:
    if job.ranks == 1:
        return ["nothing: there is one rank"]
    sizes = _sizes(model)
    parts = [
        (what, amount)
        for what, amount in strategy_traffic.sent_bytes_per_step(strategy, sizes, job, _frozen(model))
        if amount
    ]
    plain, total = strategy_traffic.all_reduced(sizes, job.ranks), sum(amount for _, amount in parts)
    rows = [*parts, ("in all", total)] if len(parts) > 1 else parts
    rows.append(("without any strategy", plain))
    lines = [(what, _amount(amount, model)) for what, amount in rows]
    if total and round(plain / total, 1) != 1:
        ratio = f"{plain / total:.3g} times as much" if plain > total else f"and this is {total / plain:.3g} times that"
        lines[-1] = (lines[-1][0], f"{lines[-1][1]}, {ratio}")
    return text_table(lines) + list(_remarks(strategy, model, job))


def _remarks(strategy: Strategy, model: nn.Module | None, job: RankCounts) -> Iterator[str]:
    dgc, local = strategy.part(Dgc), strategy_traffic.local_steps(strategy)
    if dgc and all(size.numel < dgc.min_size for size in _sizes(model)):
        yield f"dgc compresses nothing: no parameter has {dgc.min_size:,} entries (Dgc(min_size=...))"
    elif dgc and dgc.hierarchical and job.hosts == 1:
        yield "dgc compresses only messages between hosts, and there is one host; give ranks_per_host="
    if dgc and dgc.rampup_begin_step:
        yield f"before step {dgc.rampup_begin_step:,} everything travels whole"
    if dgc and len(dgc.sparsity) > 1:
        yield f"the figure is for sparsity {dgc.sparsity[-1]:g}; it begins with {dgc.sparsity[0]:g}"
    if local and local.begin_step:
        yield f"before step {local.begin_step:,} weights travel after every update"
    if isinstance(local, AdaptiveLocalSgd):
        yield f"the figure is for {local.init_k_steps} updates between averages; there may be 1 to {local.max_k_steps}"
    if local and local.average_momentum:
        yield "and as much again for each tensor of optimizer state that a weight has (SGD: 1, Adam: 2)"
    if model is not None:
        yield from _remarks_on(model, strategy, job)


def _remarks_on(model: nn.Module, strategy: Strategy, job: RankCounts) -> Iterator[str]:
    from echelon.plan.build import sparse_names

    if norms := _shared_batch_norms(strategy, model, job):
        amount = sum(4 * getattr(norm, "num_features", 0) * 4 for norm in norms) * (job.ranks - 1)
        yield f"and statistics of {len(norms)} batch norms: {size(amount)} in {2 * len(norms)} exchanges"
    if sparse := sparse_names(model):
        yield f"and the rows that a batch uses of {', '.join(sorted(sparse))} (sparse gradients)"


def _memory(strategy: Strategy, model: nn.Module | None, job: RankCounts, sample: Any) -> list[str]:
    added = strategy_traffic.added_memory(strategy, _sizes(model), job)
    rows = [(name, f"+ {_amount(amount, model)}", why) for name, why, amount in added if amount]
    rows += _activations(strategy, model, sample)
    return [*_sharded(strategy, model, job), *text_table(rows)]


def _sharded(strategy: Strategy, model: nn.Module | None, job: RankCounts) -> Iterator[str]:
    """Yield the table of bytes per rank at each sharding level; the chosen level is marked with ``*``."""
    shard = strategy.part(Shard)
    if shard is None or job.ranks == 1:
        return
    trained, frozen = sum(size.bytes for size in _sizes(model)), _frozen(model)
    ranks = strategy_traffic.sharing_ranks(shard, job)
    state = "optimizer state, for each tensor of it (momentum: 1, Adam: 2)"
    rows: list[tuple[str, ...]] = [("shard", "parameters", "gradients", state)]
    for level in range(4):
        held = strategy_traffic.model_state_bytes(level, trained, frozen, ranks, strategy.gradient_merge)
        name = f"level {level}{' *' if level == shard.level else ''}" if level else "without"
        rows.append((name, *(_amount(amount, model) for amount in (held.parameters, held.gradients, held.state))))
    yield from text_table(rows)
    if shard.level == strategy_traffic.WHOLE_LAYER and model is not None:
        yield f"and whole while they compute: a layer or two, of which the largest takes {size(_largest_unit(model))}"
    if shard.offload:
        what = "all three" if shard.offload == "parameters" else "gradients and optimizer state"
        yield f"where the device is a GPU, {what} of the chosen level are in host memory"


def _largest_unit(model: nn.Module) -> int:
    from echelon.parallel.zero.wrap_policy import find_units

    named = dict(model.named_parameters())
    units = find_units(model, named).values()
    return max(sum(named[name].nbytes for name in names) for names in units)


def _activations(strategy: Strategy, model: nn.Module | None, sample: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the bytes that a forward pass saves for backward, with and without recomputation."""
    recompute = strategy.part(Recompute)
    if model is None or sample is None:
        if recompute:
            yield "recompute", "- activations", "how many bytes: explain(model, sample=...) says"
        return
    from echelon.plan.segments import find_chains, find_segments

    without = _measured(strategy, model, sample)
    if recompute is None:
        yield "activations", f"+ {size(without)}", "for this sample"
        return
    chains = find_chains(model) if recompute.checkpoints == "auto" else ()
    left = _measured(strategy, model, sample, find_segments(model, recompute.checkpoints), chains)
    stay = f"{size(left)} stay{' in host memory' if recompute.offload else ''}"
    yield "recompute", f"- {size(without - left)}", f"of {size(without)} activations for this sample; {stay}"


def _measured(strategy: Strategy, model: nn.Module, sample: Any, *recomputed: Any) -> int:
    from echelon.plan.saved_bytes import activation_bytes

    amp = strategy.part(Amp)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[amp.dtype] if amp else None
    batch = sample if isinstance(sample, dict) else tuple(sample) if isinstance(sample, list | tuple) else (sample,)
    try:
        with torch.autocast(device, dtype) if amp else contextlib.nullcontext():
            return activation_bytes(model, batch, *recomputed)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the model does not run on the sample: {first_line(error)}") from None


def _sizes(model: nn.Module | None) -> list[ParameterSize]:
    """Return the sizes of the trained parameters that have dense gradients."""
    if model is None:
        return [NOMINAL]
    from echelon.plan.build import sparse_names

    sparse = sparse_names(model)
    trained = [p for name, p in model.named_parameters() if p.requires_grad and name not in sparse]
    return [ParameterSize(parameter.numel(), parameter.element_size()) for parameter in trained]


def _frozen(model: nn.Module | None) -> float:
    """Return the bytes of the parameters that are not trained."""
    if model is None:
        return 0.0
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def _shared_batch_norms(strategy: Strategy, model: nn.Module, job: RankCounts) -> list[Any]:
    """Return the batch norms whose statistics cover all replicas.

    By default these are all batch norms, unless replicas step alone (local SGD).
    """
    from echelon.plan.batch_norms import batch_norm_names

    alone = strategy.part(LocalSgd) or strategy.part(AdaptiveLocalSgd)
    share = not alone if strategy.sync_batch_norm is None else strategy.sync_batch_norm
    return [model.get_submodule(name) for name in batch_norm_names(model)] if share and job.ranks > 1 else []


def _amount(amount: float, model: nn.Module | None) -> str:
    return size(amount) if model is not None else f"{amount / NOMINAL.numel:.3g} bytes per parameter"
