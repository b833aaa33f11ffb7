"""Evaluation: every sample once, on all ranks together, one small reduction at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import DataError, UsageError, nearest
from echelon.objective import as_batch
from echelon.world import World

Metric = Callable[[Any, Any], Tensor]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 for every sample whose largest output is at its target."""
    return (output.argmax(dim=1) == target).float()


def top5(output: Tensor, target: Tensor) -> Tensor:
    """1 for every sample whose target is among its five largest outputs."""
    best = output.topk(min(5, output.shape[1]), dim=1).indices
    return (best == target.unsqueeze(1)).any(dim=1).float()


METRICS: dict[str, Metric] = {"accuracy": accuracy, "top5": top5}


class Judged(NamedTuple):
    """What became of some samples."""

    batch: Any
    output: Any
    loss: Tensor
    samples: float


def evaluate(
    model: nn.Module,
    judge: Callable[[Any], Iterable[Judged]],
    batches: Iterable[Any],
    metrics: Mapping[str, Metric | str] | Sequence[str],
    world: World,
    taken: Callable[[], int | None],
) -> dict[str, float]:
    """Mean of the loss and of each metric over all samples of all ranks.

    ``judge`` runs a batch; of several ranks that work on one, it has ``samples`` on one of them only.

    A metric is ``metric(output, target)`` and returns one value a sample, or their mean. ``taken()`` says how many
    samples of the batch just handed out count (0 for a stand-in).
    """
    chosen = resolve(metrics)
    sums = torch.zeros(2 + len(chosen), dtype=torch.double, device=world.device)  # samples, loss, metrics
    with _evaluating(model), torch.no_grad():
        for item in batches:
            batch = as_batch((item,), {}, world.device)
            share = taken()
            for judged in judge(batch):
                values = _weighted(judged, chosen)  # also where it counts for nothing: metrics may ask other ranks
                if share != 0 and judged.samples:
                    sums += values
    if world.size > 1:
        dist.all_reduce(sums)
    if not sums[0]:
        raise DataError("there is nothing to evaluate: no rank got a sample")
    means = (sums[1:] / sums[0]).tolist()
    return dict(zip(["loss", *chosen], means, strict=True))


def _weighted(judged: Judged, metrics: Mapping[str, Metric]) -> Tensor:
    target = judged.batch if isinstance(judged.batch, Mapping) else judged.batch[-1]
    values = [judged.loss, *(metric(judged.output, target).double().mean() for metric in metrics.values())]
    means = torch.stack([torch.ones((), device=judged.loss.device), *values])
    return means.double() * judged.samples


def resolve(metrics: Mapping[str, Metric | str] | Sequence[str]) -> dict[str, Metric]:
    """Metrics by name: a dict of functions, or a list of names of ours."""
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
