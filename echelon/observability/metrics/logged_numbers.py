"""``LoggedNumbers``: the numbers that a script logs on this rank, and the rules that merge them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from echelon.base.errors import UsageError, nearest
from echelon.observability.metrics.deferred_scalar import DeferredScalar

#: Rules by name: function from the values of replicas to one number. ``last`` takes rank 0's own number instead.
RULES: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "sum": sum, "max": max, "min": min}
LAST = "last"

#: A number in a message between ranks: step, name, rule, value.
PlainNumber = tuple[int, str, str, float]
#: Merged numbers by name, by step.
Merged = dict[int, dict[str, float]]


class RankNumbers(NamedTuple):
    """The numbers of one rank.

    replica: index of the batch that the rank reads; ranks with the same one count as one
    """

    rank: int
    replica: int
    numbers: Sequence[PlainNumber]


class _Number(NamedTuple):
    step: int
    name: str
    rule: str
    value: float | DeferredScalar


class LoggedNumbers:
    """Numbers of this rank that are not merged yet. A tensor on a GPU is read when they are taken."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._waiting: list[_Number] = []

    def add(self, step: int, values: Mapping[str, Any], reduce: str | None) -> None:
        """Keep these numbers. Raises ``UsageError`` for an unknown rule or a value that is not one number."""
        rule = LAST if reduce is None else reduce
        if rule != LAST and rule not in RULES:
            raise UsageError(f"log(reduce={reduce!r}): unknown rule{nearest(str(reduce), [*RULES, LAST])}")
        found = [_Number(step, name, rule, _number(name, value)) for name, value in values.items()]
        if rule != LAST or self._rank == 0:
            self._waiting += found

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def has_deferred(self) -> bool:
        """True if a GPU may not have computed some number."""
        return any(isinstance(number.value, DeferredScalar) for number in self._waiting)

    def take(self, until: int | None = None) -> list[PlainNumber]:
        """Return the numbers of the steps up to ``until`` (default: all), and forget them."""
        taken = [number for number in self._waiting if until is None or number.step <= until]
        self._waiting = [number for number in self._waiting if until is not None and number.step > until]
        return [(n.step, n.name, n.rule, n.value if isinstance(n.value, float) else n.value.read()) for n in taken]


def merge(ranks: Iterable[RankNumbers]) -> Merged:
    """Merge the numbers of ranks by step and name.

    Only ranks that have logged a number take part in it. Ranks that read the same batch count as one, with their mean;
    then the rule is applied to the replicas, in their order. If ranks give different rules, the lowest rank's holds.
    """
    found: dict[tuple[int, str], dict[int, dict[int, float]]] = {}  # values by step and name, replica, rank
    rules: dict[tuple[int, str], str] = {}
    for each in sorted(ranks, key=lambda one: one.rank):
        for step, name, rule, value in each.numbers:
            rules.setdefault((step, name), rule)
            found.setdefault((step, name), {}).setdefault(each.replica, {})[each.rank] = value
    merged: Merged = {}
    for (step, name), replicas in sorted(found.items(), key=lambda one: one[0][0]):
        rule = rules[step, name]
        if rule == LAST:
            value = next(iter(next(iter(replicas.values())).values()))
        else:
            value = RULES[rule]([fmean(replicas[replica].values()) for replica in sorted(replicas)])
        merged.setdefault(step, {})[name] = value
    return merged


def _number(name: str, value: Any) -> float | DeferredScalar:
    """Return the value as a float; that of a tensor on a GPU is read later."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise UsageError(f"log(): '{name}' is a {type(value).__name__}; give numbers, or tensors of one number")
    if isinstance(value, Tensor) and value.is_cuda and value.numel() == 1:
        return DeferredScalar(value.detach().reshape(()), f"log(): {name}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        raise UsageError(f"log(): '{name}' is not one number; take its mean, for example") from None
