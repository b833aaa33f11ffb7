"""Grid: this rank's place in the plan's mesh, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from echelon.base.mesh import AXES, coordinates, rank_groups
from echelon.distributed.process_groups import ProcessGroups


class MeshGroups:
    """One process's view of the mesh. All ranks ask for the same groups in the same order: each is made once."""

    def __init__(self, mesh: Mapping[str, int], order: Sequence[int], rank: int, groups: ProcessGroups) -> None:
        self._mesh, self._order, self._rank, self._groups = mesh, order, rank, groups
        self.at = coordinates(mesh, order, rank)  #: this rank's index along every axis
        self._made: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def size(self, *axes: str) -> int:
        """How many ranks there are along these axes together."""
        product = 1
        for axis in axes:
            product *= self._mesh.get(axis, 1)
        return product

    def index(self, *axes: str) -> int:
        """This rank's place among them."""
        return self.ranks(*axes).index(self._rank)

    def ranks(self, *axes: str) -> list[int]:
        """The ranks that differ from this one along ``axes`` only, this one included."""
        return next(line for line in rank_groups(self._mesh, self._order, axes) if self._rank in line)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Their process group; ``None`` where this rank is alone. The same group however often it is asked for."""
        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._made:
            everyone = self.size(*key) == self.size(*AXES) > 1 and not self._order
            self._made[key] = dist.group.WORLD if everyone else self.new_group(*key)
        return self._made[key]

    def control(self, *axes: str) -> dist.ProcessGroup | None:
        """A group of the same ranks for small messages between hosts' memories."""
        key = ("control", *(axis for axis in AXES if axis in axes))
        if key not in self._made:
            alone = self.size(*axes) == 1
            self._made[key] = None if alone else self._mine(rank_groups(self._mesh, self._order, axes), "gloo")
        return self._made[key]

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        """As ``group``, but with connections of its own."""
        return None if self.size(*axes) == 1 else self._mine(rank_groups(self._mesh, self._order, axes))

    def among(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks at these places along the stage axis, with connections of their own; ``None`` elsewhere."""
        return self._mine(
            [[line[place] for place in places] for line in rank_groups(self._mesh, self._order, ("stage",))]
        )

    def _mine(self, sets: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        mine = None
        for ranks in sets:
            made = self._groups.new(ranks, backend)
            mine = made if self._rank in ranks else mine
        return mine
