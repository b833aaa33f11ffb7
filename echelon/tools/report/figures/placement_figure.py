"""Which device does what: the ranks of every host, each with its place on the mesh and what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observability.runlog.run_metadata import RankMetadata, RunMetadata, StageMetadata

#: With more ranks than this, only their numbers are shown; with still more, not all of them.
MOST_WITH_WORDS, MOST_RANKS = 64, 1024


@dataclass(frozen=True)
class DeviceTile:
    """place: along the axes that have more than one; colour: of its first stage, or 0; units: what it runs, in words"""

    rank: int
    device: str
    place: str
    colour: int
    units: str

    @property
    def title(self) -> str:
        return ", ".join(part for part in (f"rank {self.rank}", self.place, self.units, self.device) if part)


@dataclass(frozen=True)
class HostTiles:
    name: str
    devices: list[DeviceTile]


@dataclass(frozen=True)
class PlacementFigure:
    """unknown: ranks that have not said where they are: workers of parameter servers alone do not meet"""

    hosts: list[HostTiles]
    words: bool
    left_out: int
    unknown: int = 0


def placement(facts: RunMetadata) -> PlacementFigure | None:
    """None where the run has not said where its ranks are."""
    ranks = sorted(facts.ranks, key=lambda rank: rank.rank)
    if not ranks:
        return None
    shown = ranks[:MOST_RANKS]
    hosts = [
        HostTiles(name, [_device(rank, facts) for rank in group])
        for name, group in itertools.groupby(shown, key=lambda rank: rank.host)
    ]
    unknown = max(0, facts.world.size - len(ranks))
    return PlacementFigure(hosts, len(ranks) <= MOST_WITH_WORDS, len(ranks) - len(shown), unknown)


def _device(rank: RankMetadata, facts: RunMetadata) -> DeviceTile:
    stages = [stage for stage in facts.stages if rank.rank in stage.ranks]
    place = ", ".join(f"{axis} {at}" for axis, at in rank.at.items() if facts.mesh.get(axis, 1) > 1)
    colour = stages[0].stage if stages else rank.at.get("stage", 0)
    return DeviceTile(rank.rank, rank.device, place, colour % 8, units_in_words(stages))


def units_in_words(stages: Sequence[StageMetadata]) -> str:
    """``embed to layers.5; layers.12 to layers.17``."""
    spans = [stage.units for stage in stages if stage.units]
    return "; ".join(units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}" for units in spans)
