"""The table of the logged device placement: the ranks that hold each part of the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.base.formatting import text_table
from echelon.base.mesh import coordinates
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import within

Row = tuple[str, str, str, str]

_NAMED = 3  #: most unsplit parameters of a split module that are listed by name


@dataclass(frozen=True)
class ParameterPlacement:
    """The parts of the model that the ranks hold, as far as they are known.

    stages: stages that hold each parameter; empty without a pipeline; None before a forward pass was traced
    cut:    parameters of which each rank of the split axis holds a part
    shared: description of the state that is sharded over replicas, such as "optimizer state in 2 parts"
    """

    stages: Mapping[str, tuple[int, ...]] | None = None
    cut: Collection[str] = ()
    shared: str = ""


@dataclass(frozen=True)
class _Devices:
    mesh: Mapping[str, int]
    order: Sequence[int]
    ranks_per_host: int

    def row(self, name: str, stages: Collection[int], how: Iterable[str]) -> Row:
        """Return the row of a part that ``stages`` hold; empty ``stages`` mean all ranks."""
        places = {stage % self.mesh.get("stage", 1) for stage in stages}
        copies: list[list[int]] = [[] for _ in range(self.mesh.get("replicate", 1))]
        for rank in self.order or range(math.prod(self.mesh.values())):
            at = coordinates(self.mesh, self.order, rank)
            if not places or at["stage"] in places:
                copies[at["replicate"]].append(rank)
        devices = [" ".join(map(self._device, ranks)) for ranks in copies]
        ranks = [" ".join(map(str, ranks)) for ranks in copies]
        return name, " | ".join(ranks), " | ".join(devices), ", ".join(word for word in how if word)

    def _device(self, rank: int) -> str:
        host, device = divmod(rank, self.ranks_per_host)
        return f"{host}:{device}"


def placement_table(
    marks: ModelMarks,
    mesh: Mapping[str, int],
    order: Sequence[int],
    ranks_per_host: int,
    held: ParameterPlacement | None = None,
) -> list[str]:
    """Return one line per annotated module, then one per remaining group of parameters; ``|`` separates replicas.

    Without ``held`` the table shows the marks only.
    """
    devices, held = _Devices(mesh, order, ranks_per_host), held or ParameterPlacement()
    rows = [("module", "ranks", "host:device", "how"), *_marked(marks, held, devices), *_others(marks, held, devices)]
    return text_table(rows)


def _marked(marks: ModelMarks, held: ParameterPlacement, devices: _Devices) -> Iterator[Row]:
    for name in _names(marks):
        stages = _stages_of(name, marks, held)
        if stages is not None:
            yield devices.row(name or "(the model)", stages, [*_how(name, stages, marks, held, devices), held.shared])


def _names(marks: ModelMarks) -> list[str]:
    return list(dict.fromkeys([*marks.units, *marks.splits, *marks.replicates]))


def _stages_of(name: str, marks: ModelMarks, held: ParameterPlacement) -> tuple[int, ...] | None:
    """Return the stages of an annotated module; () for all ranks; None if its parameters are on different stages."""
    unit = next((number for unit, number in marks.units.items() if within(name, unit)), None)
    if unit is not None:
        return (unit,)
    result = {stages for parameter, stages in (held.stages or {}).items() if within(parameter, name)}
    return () if not result else next(iter(result)) if len(result) == 1 else None


def _how(
    name: str, stages: Collection[int], marks: ModelMarks, held: ParameterPlacement, devices: _Devices
) -> Iterator[str]:
    yield _staged(stages)
    if name in marks.splits:
        yield f"split {marks.splits[name].how} over {devices.mesh.get('split', 1)}{_whole(name, held)}"
    if name in marks.replicates and not (stages and held.stages):
        yield "replicated"


def _whole(name: str, held: ParameterPlacement) -> str:
    """Return text that names the parameters of a split module that every rank of the split axis has whole."""
    inside = [parameter for parameter in held.stages or {} if within(parameter, name)]
    whole = [parameter for parameter in inside if parameter not in held.cut]
    if not whole or not held.cut:
        return ""
    short = [parameter.removeprefix(f"{name}.") for parameter in whole[:_NAMED]]
    more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
    return f" ({', '.join(short)}{more} whole)"


def _others(marks: ModelMarks, held: ParameterPlacement, devices: _Devices) -> Iterator[Row]:
    """Yield rows for parameters without a mark, and for parameters of annotated modules on other stages."""
    if held.stages is None:
        yield devices.row("(the rest)", (), ["replicated" if marks.default is None else str(marks.default)])
        return
    rest, apart = _sorted_out(marks, held.stages)
    if len(set(rest.values())) == 1 and not apart:
        rows = {"(the rest)": next(iter(rest.values()))}
    else:
        rows = _coarsest(rest, held.stages) | _coarsest(apart, held.stages)
    for name, stages in rows.items():
        yield devices.row(name, stages, [_staged(stages) or _unstaged(held), held.shared])


def _unstaged(held: ParameterPlacement) -> str:
    return "" if held.shared.startswith("in ") else "replicated"


def _sorted_out(
    marks: ModelMarks, stages: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return parameters without a mark, and parameters on other stages than the row of their annotated module says."""
    known = ParameterPlacement(stages=stages)
    shown = {name: _stages_of(name, marks, known) for name in _names(marks)}
    rest, apart = {}, {}
    for parameter, where in stages.items():
        around = [shown[name] for name in shown if within(parameter, name)]
        if not around:
            rest[parameter] = where
        elif where not in around:
            apart[parameter] = where
    return rest, apart


def _coarsest(chosen: Mapping[str, tuple[int, ...]], everything: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Group ``chosen`` by the largest modules whose parameters are all chosen and on the same stages."""
    result = {}
    for name, where in chosen.items():
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        result[next(p for p in prefixes if all(chosen.get(o) == where for o in everything if within(o, p)))] = where
    return result


def _staged(stages: Collection[int]) -> str:
    numbers = [str(stage) for stage in sorted(stages)]
    if len(numbers) < 2:
        return f"stage {numbers[0]}" if numbers else ""
    return f"stages {', '.join(numbers[:-1])} and {numbers[-1]}"
