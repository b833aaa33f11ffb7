"""Evaluation: every sample once, on all ranks together, one small reduction at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import DataError, UsageError, nearest
from echelon.objective import Objective, as_batch, count_samples

Metric = Callable[[Any, Any], Tensor]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 for every sample whose largest output is at its target."""
    return (output.argmax(dim=1) == target).float()


METRICS: dict[str, Metric] = {"accuracy": accuracy}


def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric | str] | Sequence[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    taken: Callable[[], int | None],
) -> dict[str, float]:
    """Mean of the loss and of each metric over all samples of all ranks.

    A metric is ``metric(output, target)`` and returns one value a sample, or their mean. ``taken()`` says how many
    samples of the batch just handed out count (0 for a stand-in).
    """
    chosen = resolve(metrics)
    sums = torch.zeros(2 + len(chosen), dtype=torch.double, device=device)  # samples, loss, metrics
    with _evaluating(model), torch.no_grad():
        for item in batches:
            batch = as_batch((item,), {}, device)
            share = taken()
            samples = count_samples(batch) if share is None else share
            if samples == 0:
                continue
            output, loss = objective(batch)
            target = objective.target(batch)
            values = [loss, *(metric(output, target).double().mean() for metric in chosen.values())]
            sums[0] += samples
            sums[1:] += torch.stack([value.double() for value in values]) * samples
    if group is not None:
        dist.all_reduce(sums, group=group)
    if not sums[0]:
        raise DataError("there is nothing to evaluate: no rank got a sample")
    means = (sums[1:] / sums[0]).tolist()
    return dict(zip(["loss", *chosen], means, strict=True))


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
