"""``MeshGroups``: this rank's coordinates in the plan's mesh, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from echelon.base.mesh import AXES, coordinates, parts_of_axis, rank_groups
from echelon.distributed.host_memory import HostMemory
from echelon.distributed.process_groups import ProcessGroups


class MeshGroups:
    """One rank's view of the mesh. All ranks must request the same groups in the same order; each is made once."""

    def __init__(self, mesh: Mapping[str, int], order: Sequence[int], rank: int, groups: ProcessGroups) -> None:
        self._mesh = mesh
        self._order = order
        self._rank = rank
        self._groups = groups
        self.coords = coordinates(mesh, order, rank)  #: this rank's index along every axis
        self._made: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        product = 1
        for axis in axes:
            product *= self._mesh.get(axis, 1)
        return product

    def index(self, *axes: str) -> int:
        """Return this rank's index among the ranks along these axes."""
        return self.ranks(*axes).index(self._rank)

    def ranks(self, *axes: str) -> list[int]:
        """Return the ranks that differ from this one along ``axes`` only, including this one."""
        return next(line for line in rank_groups(self._mesh, self._order, axes) if self._rank in line)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group along these axes; ``None`` if this rank is alone. It is made once."""
        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._made:
            everyone = self.size(*key) == self.size(*AXES) > 1 and not self._order
            self._made[key] = dist.group.WORLD if everyone else self.new_group(*key)
        return self._made[key]

    def control(self, *axes: str) -> dist.ProcessGroup | None:
        """Return a Gloo group of the same ranks for small messages in host memory."""
        key = ("control", *(axis for axis in AXES if axis in axes))
        if key not in self._made:
            alone = self.size(*axes) == 1
            self._made[key] = None if alone else self._own_group(rank_groups(self._mesh, self._order, axes), "gloo")
        return self._made[key]

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return a new group along these axes, with its own connections."""
        return None if self.size(*axes) == 1 else self._own_group(rank_groups(self._mesh, self._order, axes))

    def shared_memory(self, timeout: float, *axes: str) -> HostMemory | None:
        """Return memory that the ranks along these axes share; None for GPUs, and unless they are on one host."""
        group = self.group(*axes)
        if group is None or self._groups.backend != "gloo":
            return None
        return self._groups.share_memory(group, timeout)

    def inside(self, axis: str, size: int) -> dist.ProcessGroup | None:
        """Return a new group of this rank's part of an axis, ``size`` consecutive ranks; None if it is alone."""
        if size == 1:
            return None
        return self._own_group(parts_of_axis(rank_groups(self._mesh, self._order, (axis,)), size)[0])

    def across(self, axis: str, size: int) -> dist.ProcessGroup | None:
        """Return a new group of the ranks with this rank's place in the parts of an axis; None for one part."""
        if size == self.size(axis):
            return None
        return self._own_group(parts_of_axis(rank_groups(self._mesh, self._order, (axis,)), size)[1])

    def among(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Return a new group of the ranks at these positions of the stage axis; ``None`` on other ranks."""
        return self._own_group(
            [[line[place] for place in places] for line in rank_groups(self._mesh, self._order, ("stage",))]
        )

    def _own_group(self, sets: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        own = None
        for ranks in sets:
            made = self._groups.new(ranks, backend)
            own = made if self._rank in ranks else own
        return own
