"""The groups of replicas that share training state (HSDP): from the request, the mesh and the hosts. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.base.mesh import parts_of_axis, rank_groups
from echelon.strategy import Shard


def resolve_groups(
    requested: Shard | None, mesh: Mapping[str, int], order: Sequence[int], ranks_per_host: int
) -> Shard | None:
    """Return the settings with the number of replicas in a group; None as ``within`` if all share the state.

    One replica has no other to share with: the result is None then, unless state is offloaded.
    """
    replicas = mesh["replicate"]
    if requested is None or (replicas == 1 and requested.offload is None):
        return None
    if requested.within is None or replicas == 1:
        return dataclasses.replace(requested, within=None)
    size = requested.within
    if size == "host":
        size = _replicas_of_host(mesh, order, ranks_per_host)
    elif replicas % size:
        raise UsageError(
            f"Shard(within={size}): {things(replicas, 'replica')} cannot form groups of {size}; give a divisor of "
            f"{replicas}, or leave within out"
        )
    return dataclasses.replace(requested, within=None if size == replicas else size)


def _replicas_of_host(mesh: Mapping[str, int], order: Sequence[int], ranks_per_host: int) -> int:
    replicas, ranks = mesh["replicate"], mesh.get("stage", 1) * mesh.get("split", 1)
    if ranks * replicas <= ranks_per_host:
        return replicas
    size = ranks_per_host // ranks
    if size < 2:
        held = "no whole replica" if size == 0 else "one replica"
        raise UsageError(
            f"Shard(within='host'): a host of {things(ranks_per_host, 'rank')} has {held}, and a group needs two; "
            "leave within out"
        )
    if replicas % size == 0:
        inside, _ = parts_of_axis(rank_groups(mesh, order, ("replicate",)), size)
        if all(len({rank // ranks_per_host for rank in group}) == 1 for group in inside):
            return size
    raise UsageError(
        f"Shard(within='host'): {things(replicas, 'replica')} of {things(ranks, 'rank')} do not lie evenly on hosts of "
        f"{ranks_per_host}; give a number of replicas"
    )
