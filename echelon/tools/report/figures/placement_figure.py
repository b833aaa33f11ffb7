"""Figure of the placement: the ranks of every host, each with its mesh coordinates and its units."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observability.runlog.run_metadata import RankMetadata, RunMetadata, StageMetadata

#: Largest number of ranks shown with text, and of ranks shown at all.
MOST_WITH_WORDS, MOST_RANKS = 64, 1024


@dataclass(frozen=True)
class DeviceTile:
    """One rank in the figure.

    place:  coordinates along mesh axes of size above 1, as text
    colour: color index of the rank's first stage, 0 without stages
    units:  units that the rank runs, as text
    """

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
    """The placement of all ranks.

    words:    True if tiles show text
    left_out: number of ranks not shown
    unknown:  number of ranks without a known host; workers that use only parameter servers do not exchange it
    """

    hosts: list[HostTiles]
    words: bool
    left_out: int
    unknown: int = 0


def placement(facts: RunMetadata) -> PlacementFigure | None:
    """Return the figure; None if the hosts of the ranks are not known."""
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
    """Return text such as ``embed to layers.5; layers.12 to layers.17``."""
    spans = [stage.units for stage in stages if stage.units]
    return "; ".join(units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}" for units in spans)
