"""Evaluation: every sample once, on all ranks together, one small reduction at the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.base.errors import DataError, UsageError, nearest
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import all_gather
from echelon.distributed.world import World
from echelon.parallel.data.batch_norm import stand_in_batch
from echelon.parallel.loss.loss_reduction import Count, times_count
from echelon.parallel.loss.loss_weights import EvaluationWeights
from echelon.parallel.objective import Objective, as_batch, count_samples
from echelon.parallel.tensor import ShardedActivation

Mean = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Overall:
    """A metric that is no mean over samples: it needs all of them at once.

    keep:  what it needs of some samples, ``keep(output, target)``: a row of a few numbers for each. The rows of all
           ranks come together on every one, as doubles
    judge: the metric, ``judge(rows)``
    """

    keep: Callable[[Any, Any], Tensor]
    judge: Callable[[Tensor], float]


Metric = Mean | Overall


def predictions(output: Any) -> Any:
    """What of a model's output metrics of ours look at, where it returns a loss beside it: ``logits``, or of a tuple
    such as ``(logits, loss)`` the only tensor that is no scalar."""
    if isinstance(output, Tensor | ShardedActivation):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if named is not None:
        return named
    several = output if isinstance(output, tuple | list) else ()
    found = [
        each for each in several if isinstance(each, ShardedActivation) or (isinstance(each, Tensor) and each.dim())
    ]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"metrics take the model's output, and it is a {type(output).__name__} with {len(found)} tensors that may be "
        "meant; give a function: metrics={'accuracy': lambda output, target: ...}"
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 for every sample whose largest output is at its target."""
    right: Tensor = predictions(output).argmax(dim=1) == target
    return right.float()


def top5(output: Tensor, target: Tensor) -> Tensor:
    """1 for every sample whose target is among its five largest outputs."""
    output = predictions(output)
    best = output.topk(min(5, output.shape[1]), dim=1).indices
    return (best == target.unsqueeze(1)).any(dim=1).float()


def scored(output: Any, target: Tensor) -> Tensor:
    """Each sample's score, and whether it is a positive; of two classes' outputs, how far the second is ahead."""
    output = predictions(output)
    scores: Tensor = (output.whole() if isinstance(output, ShardedActivation) else output).detach().double()
    if scores.shape == (*target.shape, 2):
        scores = scores[..., 1] - scores[..., 0]
    if scores.numel() != target.numel():
        raise UsageError(
            f"auc takes one score for each label, or the outputs of two classes; the output has shape "
            f"{tuple(scores.shape)} and the target {tuple(target.shape)}"
        )
    return torch.stack([scores.flatten(), (target.flatten() > 0.5).double()], dim=1)


def area_under_curve(rows: Tensor) -> float:
    """The chance that a positive has a higher score than a negative, ties counted half. Not a number without both."""
    scores, positive = rows[:, 0], rows[:, 1] > 0.5
    if scores.isnan().any():
        return float("nan")
    _, place, equal = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (equal.cumsum(0) - (equal - 1) / 2)[place]  # from 1; equal scores share the mean of theirs
    ones, zeros = float(positive.sum()), float((~positive).sum())
    above = float(ranks[positive].sum()) - ones * (ones + 1) / 2
    return above / (ones * zeros) if ones and zeros else float("nan")


METRICS: dict[str, Metric] = {"accuracy": accuracy, "top5": top5, "auc": Overall(scored, area_under_curve)}


@dataclass(frozen=True)
class EvalOutput:
    """Output and loss of some samples.

    count:  what the loss averages over: their rows, or targets that count
    is_sum: the loss is a sum over them; its mean is over samples
    """

    batch: Any
    output: Any
    loss: Tensor
    samples: float
    count: Count
    is_sum: bool = False


def evaluate_batch(objective: Objective, batch: Any, weights: EvaluationWeights) -> EvalOutput:
    """Return output and loss of a batch that is run at once."""
    output, loss = objective(batch)
    rows = count_samples(batch)
    count = weights.count(objective.take_seen(), rows)
    return EvalOutput(batch, output, loss, rows, count, weights.is_sum)


def evaluate(
    model: nn.Module,
    judge: Callable[[Any], Iterable[EvalOutput]],
    batches: Iterable[Any],
    metrics: Mapping[str, Metric | str] | Sequence[str],
    world: World,
    taken: Callable[[], int | None],
) -> dict[str, float]:
    """Mean of the loss and of each metric over all samples of all ranks.

    ``judge`` runs a batch; of several ranks that work on one, it has ``samples`` on one of them only.

    A metric is ``metric(output, target)`` and returns one value a sample, or their mean; or it is an ``Overall``.
    ``taken()`` says how many samples of the batch just handed out count (0 for a stand-in).
    """
    chosen = resolve(metrics)
    means, overall = _Means(chosen, world), _GatheredMetrics(chosen, world)
    with _evaluating(model), torch.no_grad():
        for item in batches:
            batch = as_batch((item,), {}, world.device)
            share = taken()
            with stand_in_batch(share == 0):
                results = judge(batch)
            for judged in results:
                counts = share != 0 and judged.samples > 0
                means.add(judged, counts)
                overall.add(judged, counts)
    found = means.result() | overall.result()
    return {name: found[name] for name in ("loss", *chosen)}


class _Means:
    """Sums of the loss and of metrics, on their way to means. Metrics are asked also where nothing counts: those of
    split outputs take all ranks that share them."""

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        self._metrics = {name: metric for name, metric in metrics.items() if not isinstance(metric, Overall)}
        self._world = world
        # what losses average over, losses, samples, metrics
        self._sums = torch.zeros(3 + len(self._metrics), dtype=torch.double, device=world.device)

    def add(self, judged: EvalOutput, counts: bool) -> None:
        target = _target(judged)
        metrics = [metric(judged.output, target).double().mean() for metric in self._metrics.values()]
        if not counts:
            return
        device, samples = self._sums.device, judged.samples
        count: Count = samples if judged.is_sum else judged.count
        loss = judged.loss.double()
        loss = loss if judged.is_sum else times_count(loss, count)
        values = [count, loss, samples, *(metric * samples for metric in metrics)]
        self._sums += torch.stack([torch.as_tensor(value, dtype=torch.double, device=device) for value in values])

    def result(self) -> dict[str, float]:
        if self._world.size > 1:
            with waiting("sum of the evaluation"):
                dist.all_reduce(self._sums)
        count, loss, samples, *metrics = self._sums.tolist()
        if not samples:
            raise DataError("there is nothing to evaluate: no rank got a sample")
        means = {name: total / samples for name, total in zip(self._metrics, metrics, strict=True)}
        return {"loss": loss / count if count else math.nan, **means}


class _GatheredMetrics:
    """What metrics of all samples have kept of them so far."""

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        self._metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, Overall)}
        self._kept: dict[str, list[Tensor]] = {name: [] for name in self._metrics}
        self._world = world

    def add(self, judged: EvalOutput, counts: bool) -> None:
        for name, metric in self._metrics.items():
            rows = metric.keep(judged.output, _target(judged))
            if counts:
                self._kept[name].append(rows.double())

    def result(self) -> dict[str, float]:
        return {name: metric.judge(_together(self._kept[name], self._world)) for name, metric in self._metrics.items()}


def _target(judged: EvalOutput) -> Any:
    return judged.batch if isinstance(judged.batch, Mapping) else judged.batch[-1]


def _together(parts: list[Tensor], world: World) -> Tensor:
    """The rows of all ranks, of which some may have none."""
    own = torch.cat(parts) if parts else torch.empty(0, 0, dtype=torch.double, device=world.device)
    if world.size == 1:
        return own
    shapes = all_gather(torch.tensor(own.shape, device=world.device))
    most, width = shapes.amax(0).tolist()
    room = own.new_zeros(most, width)
    room[: len(own), : own.shape[1]] = own
    return torch.cat([rows[:count] for rows, count in zip(all_gather(room), shapes[:, 0].tolist(), strict=True)])


def resolve(metrics: Mapping[str, Metric | str] | Sequence[str]) -> dict[str, Metric]:
    """Metrics by name: a dict of metrics and names of ours, or a list of names."""
    named: dict[str, Metric | str] = dict(metrics) if isinstance(metrics, Mapping) else {m: m for m in metrics}
    return {name: _ours(metric) if isinstance(metric, str) else metric for name, metric in named.items()}


def _ours(name: str) -> Metric:
    if name not in METRICS:
        raise UsageError(f"there is no metric '{name}'{nearest(name, METRICS)}")
    return METRICS[name]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is back in the mode it had (a frozen one stays frozen)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
