"""Slices: which ranks form one slice, the devices of one copy of the model. Pure arithmetic on ranks and hosts.

    all       the default: slices of consecutive ranks
    average   slices of ``average`` devices each
    row       a slice is a row of the device matrix: all devices of one host
    specific  slices as listed
    auto      as few hosts a slice as can be

A slice is as large as the marks need: stages times the size of a split. Where nothing fixes the size of a split, the
slice fixes it: ``slice_size / stages``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType

from echelon.annotation import Marks
from echelon.errors import UsageError
from echelon.marks import within
from echelon.plan.mesh import coordinates
from echelon.strict import require, strict

_open: list[Slices] = []


@strict
class Slices:
    """How ranks are cut into slices; passed to ``distribute(cluster=...)`` or opened around it."""

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
        """Devices of a slice, where the cluster says so; ``None`` where the marks alone decide."""
        if self.specific is not None:
            return len(self.specific[0])
        return ranks_per_host if self.row else self.average

    def arrange(self, needed: int, world_size: int, ranks_per_host: int) -> tuple[int, ...]:
        """The ranks in the order of the mesh: each ``needed`` of them, one after another, are one slice."""
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
    """How to cut the job's devices into slices, one copy of the model each; see this module's first lines."""
    slices = None if specific is None else tuple(map(tuple, specific))
    return Slices(average=average, row=row, specific=slices, auto=auto)


def current() -> Slices:
    """The innermost open cluster; the default one where none is open."""
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
    """Each slice from the host that just holds it, or what it still lacks; a larger one begins with whole hosts.

    Slices that fit into a host never cross two, but for those that the remainders of hosts must form.
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
    """The smallest that holds all that is missing; where none does, the one that holds the most."""
    fitting = [host for host in hosts if len(host) >= missing]
    return min(fitting, key=len) if fitting else max(hosts, key=len)


def placement_table(marks: Marks, mesh: Mapping[str, int], order: Sequence[int], ranks_per_host: int) -> list[str]:
    """Which devices each marked module is on: one line a module, copies of the model divided by ``|``."""
    rows = [("module", "ranks", "host:device", "how")]
    for name in dict.fromkeys([*marks.units, *marks.splits, *marks.replicates]):
        rows.append(_placed(name, marks, mesh, order, ranks_per_host))
    rows.append(_row("(the rest)", None, _word(marks.default), mesh, order, ranks_per_host))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]


Row = tuple[str, str, str, str]


def _placed(name: str, marks: Marks, mesh: Mapping[str, int], order: Sequence[int], ranks_per_host: int) -> Row:
    stage = next((number for unit, number in marks.units.items() if within(name, unit)), None)
    words = [] if stage is None else [f"stage {stage}"]
    if name in marks.splits:
        words.append(f"split {marks.splits[name].how} over {mesh.get('split', 1)}")
    if name in marks.replicates:
        words.append("replicated")
    return _row(name or "(the model)", stage, ", ".join(words), mesh, order, ranks_per_host)


def _row(
    name: str, stage: int | None, how: str, mesh: Mapping[str, int], order: Sequence[int], ranks_per_host: int
) -> Row:
    copies: list[list[int]] = [[] for _ in range(mesh.get("replicate", 1))]
    for rank in order or range(math.prod(mesh.values())):
        at = coordinates(mesh, order, rank)
        if stage is None or at["stage"] == stage % mesh.get("stage", 1):
            copies[at["replicate"]].append(rank)
    devices = [" ".join(_device(rank, ranks_per_host) for rank in ranks) for ranks in copies]
    return name, " | ".join(" ".join(map(str, ranks)) for ranks in copies), " | ".join(devices), how


def _device(rank: int, ranks_per_host: int) -> str:
    host, device = divmod(rank, ranks_per_host)
    return f"{host}:{device}"


def _word(default: object) -> str:
    return "replicated" if default is None else str(default)


def _either(numbers: Sequence[int], word: str = "or") -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} {word} {last}" if most else last
