"""Slices: the groups of ranks that each hold one replica of the model, computed from ranks and hosts alone.

    all       slices of consecutive ranks (the default)
    average   slices of ``average`` devices each
    row       a slice is a row of the device matrix: all devices of one host
    specific  slices as listed
    auto      slices that span as few hosts as possible

A slice has the size that the marks need: stages times the size of a split. If the size of a split is not given, it is
``slice_size / stages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from echelon.base.config import require, strict
from echelon.base.errors import UsageError

_open: list[Slices] = []


@strict
class Slices:
    """A rule that groups ranks into slices, from ``cluster``; passed to ``distribute(cluster=)`` or opened around it.

    average, row, specific, auto: as in ``cluster``

    >>> slices = echelon.cluster(average=4)
    """

    average: int | None = None
    row: bool = False
    specific: tuple[tuple[int, ...], ...] | None = None
    auto: bool = False

    def __post_init__(self) -> None:
        chosen = [name for name in ("average", "row", "specific", "auto") if getattr(self, name) not in (None, False)]
        if len(chosen) > 1:
            raise UsageError(f"cluster({chosen[0]}=..., {chosen[1]}=...): slices are cut in one way; choose one")
        require(self.average is None or self.average >= 1, self, "average", "1 or more devices a slice")
        if self.specific is not None:
            _check_slices(self.specific)

    def __enter__(self) -> Slices:
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.pop()

    def slice_size(self, ranks_per_host: int) -> int | None:
        """Return the number of devices per slice if this rule fixes it; ``None`` if the marks decide it."""
        if self.specific is not None:
            return len(self.specific[0])
        return ranks_per_host if self.row else self.average

    def arrange(self, needed: int, world_size: int, ranks_per_host: int) -> tuple[int, ...]:
        """Return the ranks in the order of the mesh: each ``needed`` consecutive ones form a slice."""
        fixed = self.slice_size(ranks_per_host)
        if fixed is not None and fixed != needed:
            raise UsageError(
                f"{self} has slices of {fixed} devices, but the marks need {needed} for one copy of the model; "
                f"make slices of {needed}, or change the marks to use {fixed}"
            )
        if self.specific is not None:
            _check_coverage(self.specific, world_size)
            return tuple(rank for one in self.specific for rank in one)
        if world_size % needed:
            raise UsageError(_indivisible(needed, world_size))
        return _by_locality(needed, world_size, ranks_per_host) if self.auto else tuple(range(world_size))

    def __str__(self) -> str:
        if self.specific is not None:
            return f"cluster(specific={[list(one) for one in self.specific]})"
        if self.average is not None:
            return f"cluster(average={self.average})"
        return f"cluster({'row=True' if self.row else 'auto=True' if self.auto else ''})"


def cluster(
    *,
    average: int | None = None,
    row: bool = False,
    specific: Sequence[Sequence[int]] | None = None,
    auto: bool = False,
) -> Slices:
    """Group the devices of the job into slices, each with one replica of a marked model; at most one option is given.

    average:  number of devices per slice, taken in the order of ranks
    row:      True if a slice is all devices of one host
    specific: the ranks of each slice, as [[0, 2], [1, 3]]
    auto:     True if slices are placed on as few hosts as possible

    Without an option a slice has as many consecutive ranks as the marks need: stages times the size of a split.

    >>> engine = echelon.distribute(model, optimizer, loss=loss, cluster=echelon.cluster(average=4))
    >>> with echelon.cluster(row=True):
    ...     engine = echelon.distribute(model, optimizer, loss=loss)
    """
    slices = None if specific is None else tuple(map(tuple, specific))
    return Slices(average=average, row=row, specific=slices, auto=auto)


def current() -> Slices:
    """Return the innermost open cluster, or the default if none is open."""
    return _open[-1] if _open else Slices()


def _check_slices(slices: tuple[tuple[int, ...], ...]) -> None:
    sizes = sorted({len(one) for one in slices})
    if not sizes or sizes[0] == 0:
        raise UsageError("cluster(specific=...) has an empty slice; list the ranks of each: [[0, 1], [2, 3]]")
    if len(sizes) > 1:
        raise UsageError(
            f"cluster(specific=...) has slices of {_either(sizes, 'and')} ranks; each is one copy of the model: "
            "make them equally large"
        )
    ranks = [rank for one in slices for rank in one]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise UsageError(f"cluster(specific=...) lists rank {_either(twice, 'and')} twice; list each rank once")


def _check_coverage(slices: tuple[tuple[int, ...], ...], world_size: int) -> None:
    ranks = {rank for one in slices for rank in one}
    beyond, missing = sorted(ranks - set(range(world_size))), sorted(set(range(world_size)) - ranks)
    if beyond:
        raise UsageError(
            f"cluster(specific=...) lists rank {_either(beyond, 'and')}, but the job has ranks 0 to {world_size - 1}; "
            "list those"
        )
    if missing:
        raise UsageError(
            f"cluster(specific=...) leaves out rank {_either(missing, 'and')} of {world_size}; put every rank in a "
            f"slice, or start the job with {len(ranks)}"
        )


def _indivisible(needed: int, world_size: int) -> str:
    below, above = world_size // needed * needed, (world_size // needed + 1) * needed
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return (
        f"one copy of the model takes {needed} devices and the job has {world_size}: start it with "
        f"{_either([count for count in (below, above) if count])}, or let a copy take {_either(sizes)}"
    )


def _by_locality(needed: int, world_size: int, ranks_per_host: int) -> tuple[int, ...]:
    """Return the ranks so that each slice spans few hosts (best fit).

    A slice larger than a host takes whole hosts first.

    A slice that fits on a host spans two only if it is built from the ranks that are left over on several hosts.
    """
    hosts = [list(range(at, min(at + ranks_per_host, world_size))) for at in range(0, world_size, ranks_per_host)]
    order: list[int] = []
    while any(hosts):
        missing = needed
        while missing:
            host = _best_host(hosts, missing)
            taken = host[:missing]
            del host[:missing]
            order += taken
            missing -= len(taken)
    return tuple(order)


def _best_host(hosts: list[list[int]], missing: int) -> list[int]:
    """Return the host with the fewest free ranks among those with enough; if none has enough, the one with the most."""
    fitting = [host for host in hosts if len(host) >= missing]
    return min(fitting, key=len) if fitting else max(hosts, key=len)


def _either(numbers: Sequence[int], word: str = "or") -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} {word} {last}" if most else last
