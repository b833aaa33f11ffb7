"""Distributed evaluation: all ranks together evaluate every sample once, with one small all-reduce at the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    """A metric that is not a mean over samples and needs all of them at once.

    keep:  function ``keep(output, target)`` that returns a row of a few numbers for each sample; the rows of all ranks
           are gathered on every rank, as doubles
    judge: function ``judge(rows)`` that returns the metric
    in_order: True sorts the rows by batch, and within a batch by rank; default False: by rank
    """

    keep: Callable[[Any, Any], Tensor]
    judge: Callable[[Tensor], float]
    in_order: bool = False


@dataclass(frozen=True)
class Totals:
    """A metric of sums over all samples of all ranks.

    keep:  function ``keep(output, target)`` that returns a row of a few numbers for each sample
    judge: function ``judge(sums)`` that returns the metric, from the sums of the rows, as doubles
    """

    keep: Callable[[Any, Any], Tensor]
    judge: Callable[[Tensor], float]


@dataclass(frozen=True)
class OfLoss:
    """A metric that follows from the mean loss.

    judge: function ``judge(loss)`` that returns the metric
    """

    judge: Callable[[float], float]


Metric = Mean | Overall | Totals | OfLoss


def predictions(output: Any) -> Any:
    """Return the part of a model's output that built-in metrics use, if the model returns a loss too.

    That is ``logits``, or the only non-scalar tensor of a tuple such as ``(logits, loss)``. Raises UsageError if there
    is none or more than one.
    """
    if isinstance(output, Tensor | ShardedActivation):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if named is not None:
        return named
    several = output if isinstance(output, tuple | list) else ()
    result = [
        each for each in several if isinstance(each, ShardedActivation) or (isinstance(each, Tensor) and each.dim())
    ]
    if len(result) == 1:
        return result[0]
    raise UsageError(
        f"metrics take one tensor of the model's output, a {type(output).__name__} with {len(result)} possible "
        "tensors; give a function: metrics={'accuracy': lambda output, target: ...}"
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 for every sample whose largest output is at its target, else 0."""
    right: Tensor = predictions(output).argmax(dim=1) == target
    return right.float()


def top5(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 for every sample whose target is among its five largest outputs, else 0."""
    output = predictions(output)
    best = output.topk(min(5, output.shape[1]), dim=1).indices
    return (best == target.unsqueeze(1)).any(dim=1).float()


def scored(output: Any, target: Tensor) -> Tensor:
    """Return rows of (score, 1 if positive else 0); for two-class outputs the score is the second minus the first."""
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
    """Return the probability that a positive has a higher score than a negative, with ties counted half.

    The result is NaN if there are no positives or no negatives, or if a score is NaN.
    """
    scores, positive = rows[:, 0], rows[:, 1] > 0.5
    if scores.isnan().any():
        return float("nan")
    _, place, equal = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (equal.cumsum(0) - (equal - 1) / 2)[place]  # counted from 1; equal scores get their mean rank
    ones, zeros = float(positive.sum()), float((~positive).sum())
    above = float(ranks[positive].sum()) - ones * (ones + 1) / 2
    return above / (ones * zeros) if ones and zeros else float("nan")


def click_sums(output: Any, target: Tensor) -> Tensor:
    """Return rows of (1, label, predicted probability, log loss) from the logits of clicks."""
    scores, labels = scored(output, target).unbind(1)
    return torch.stack(
        [
            torch.ones_like(scores),
            labels,
            scores.sigmoid(),
            F.binary_cross_entropy_with_logits(scores, labels, reduction="none"),
        ],
        dim=1,
    )


def normalized_entropy(sums: Tensor) -> float:
    """Return the log loss divided by that of always predicting the share of positives; NaN if all labels are equal.

    sums: total of the rows of ``click_sums``
    """
    count, positive, _, loss = sums.tolist()
    share = positive / count if count else 0.0
    if not 0 < share < 1:
        return float("nan")
    return float(loss / -(positive * math.log(share) + (count - positive) * math.log(1 - share)))


def calibration(sums: Tensor) -> float:
    """Return the sum of predicted probabilities divided by the number of positives; NaN if there are none."""
    return float(sums[2] / sums[1]) if sums[1] else float("nan")


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean cross-entropy, which is that over tokens if the loss averages over tokens."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def windowed_auc(samples: int) -> Overall:
    """Return the metric of the area under the curve of the last ``samples`` samples of an evaluation."""
    if samples < 1:
        raise UsageError(f"windowed_auc({samples}): expected a window of one sample or more")
    return Overall(scored, lambda rows: area_under_curve(rows[-samples:]), in_order=True)


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "top5": top5,
    "auc": Overall(scored, area_under_curve),
    "ne": Totals(click_sums, normalized_entropy),
    "calibration": Totals(click_sums, calibration),
    "perplexity": OfLoss(perplexity),
}


@dataclass(frozen=True)
class EvalOutput:
    """Output and loss of some samples.

    count:  number of items that the loss averages over: rows, or targets that are not ignored
    is_sum: True if the loss is a sum over samples; default False
    """

    batch: Any
    output: Any
    loss: Tensor
    samples: float
    count: Count
    is_sum: bool = False


def evaluate_batch(objective: Objective, batch: Any, weights: EvaluationWeights) -> EvalOutput:
    """Return output and loss of a batch that is run without micro-batches."""
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
    """Return the mean of the loss and of each metric over all samples of all ranks.

    judge:   function that runs a batch; if several ranks work on one batch, only one of them reports ``samples``
    metrics: functions ``metric(output, target)`` that return one value per sample or their mean, ``Overall``,
             ``Totals`` and ``OfLoss`` metrics, or names of built-in ones
    taken:   function that returns how many samples of the last batch count (0 for a stand-in batch)
    """
    chosen = resolve(metrics)
    collectors = (_Means(chosen, world), _GatheredMetrics(chosen, world), _SummedMetrics(chosen, world))
    with _evaluating(model), torch.no_grad():
        for item in batches:
            batch = as_batch((item,), {}, world.device)
            share = taken()
            with stand_in_batch(share == 0):
                results = judge(batch)
            for evaluated in results:
                counts = share != 0 and evaluated.samples > 0
                for collector in collectors:
                    collector.add(evaluated, counts)
    result = {name: value for collector in collectors for name, value in collector.result().items()}
    result |= {name: metric.judge(result["loss"]) for name, metric in chosen.items() if isinstance(metric, OfLoss)}
    return {name: result[name] for name in ("loss", *chosen)}


class _Means:
    """Sums of the loss and of metrics over samples, from which the means are computed.

    Metrics are called even if no sample counts, because metrics of split outputs are collectives of all split ranks.
    """

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        others = (Overall, Totals, OfLoss)
        self._metrics = {name: metric for name, metric in metrics.items() if not isinstance(metric, others)}
        self._world = world
        # the counts of the losses, losses, samples, metrics
        self._sums = torch.zeros(3 + len(self._metrics), dtype=torch.double, device=world.device)

    def add(self, evaluated: EvalOutput, counts: bool) -> None:
        target = _target(evaluated)
        metrics = [metric(evaluated.output, target).double().mean() for metric in self._metrics.values()]
        if not counts:
            return
        device, samples = self._sums.device, evaluated.samples
        count: Count = samples if evaluated.is_sum else evaluated.count
        loss = evaluated.loss.double()
        loss = loss if evaluated.is_sum else times_count(loss, count)
        values = [count, loss, samples, *(metric * samples for metric in metrics)]
        self._sums += torch.stack([torch.as_tensor(value, dtype=torch.double, device=device) for value in values])

    def result(self) -> dict[str, float]:
        if self._world.mesh_size > 1:
            with waiting("sum of the evaluation"):
                dist.all_reduce(self._sums)
        count, loss, samples, *metrics = self._sums.tolist()
        if not samples:
            raise DataError("there is nothing to evaluate: no rank got a sample")
        means = {name: total / samples for name, total in zip(self._metrics, metrics, strict=True)}
        return {"loss": loss / count if count else math.nan, **means}


class _GatheredMetrics:
    """Rows that ``Overall`` metrics have kept of the samples so far."""

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        self._metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, Overall)}
        self._kept: dict[str, list[Tensor]] = {name: [] for name in self._metrics}
        self._world = world
        self._batches = 0

    def add(self, evaluated: EvalOutput, counts: bool) -> None:
        self._batches += 1
        for name, metric in self._metrics.items():
            rows = metric.keep(evaluated.output, _target(evaluated)).double()
            if counts:
                self._kept[name].append(numbered(rows, self._batches) if metric.in_order else rows)

    def result(self) -> dict[str, float]:
        return {name: self._judge(metric, self._kept[name]) for name, metric in self._metrics.items()}

    def _judge(self, metric: Overall, kept: list[Tensor]) -> float:
        rows = gathered(kept, self._world)
        return metric.judge(in_order(rows) if metric.in_order else rows)


class _SummedMetrics:
    """Sums of the rows that ``Totals`` metrics have kept."""

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        self._metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, Totals)}
        self._sums: dict[str, Tensor] = {}
        self._world = world

    def add(self, evaluated: EvalOutput, counts: bool) -> None:
        for name, metric in self._metrics.items():
            sums = metric.keep(evaluated.output, _target(evaluated)).double().sum(0)
            if counts:
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def result(self) -> dict[str, float]:
        """Return the metrics; the sums of all ranks are gathered, because one without samples has none."""
        return {
            name: metric.judge(gathered([sums[None] for sums in self._of(name)], self._world).sum(0))
            for name, metric in self._metrics.items()
        }

    def _of(self, name: str) -> list[Tensor]:
        return [self._sums[name]] if name in self._sums else []


def numbered(rows: Tensor, batch: int) -> Tensor:
    """Return the rows with the number of their batch in front, for ``in_order``."""
    return torch.cat([rows.new_full((len(rows), 1), batch), rows], dim=1)


def in_order(rows: Tensor) -> Tensor:
    """Return the rows of all ranks by batch, and within a batch by rank, without the numbers of the batches."""
    return rows[rows[:, 0].argsort(stable=True), 1:]


def _target(evaluated: EvalOutput) -> Any:
    return evaluated.batch if isinstance(evaluated.batch, Mapping) else evaluated.batch[-1]


def gathered(parts: list[Tensor], world: World) -> Tensor:
    """Return the rows of all ranks, some of which may have none."""
    own = torch.cat(parts) if parts else torch.empty(0, 0, dtype=torch.double, device=world.device)
    if world.mesh_size == 1:
        return own
    shapes = all_gather(torch.tensor(own.shape, device=world.device))
    most, width = shapes.amax(0).tolist()
    room = own.new_zeros(most, width)
    room[: len(own), : own.shape[1]] = own
    return torch.cat([rows[:count] for rows, count in zip(all_gather(room), shapes[:, 0].tolist(), strict=True)])


def resolve(metrics: Mapping[str, Metric | str] | Sequence[str]) -> dict[str, Metric]:
    """Return metrics by name, from a dict of metrics or names of built-in ones, or from a list of names."""
    named: dict[str, Metric | str] = dict(metrics) if isinstance(metrics, Mapping) else {m: m for m in metrics}
    return {name: _ours(metric) if isinstance(metric, str) else metric for name, metric in named.items()}


def _ours(name: str) -> Metric:
    if name not in METRICS:
        raise UsageError(f"there is no metric '{name}'{nearest(name, METRICS)}")
    return METRICS[name]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the context, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
