"""One identity for every process: its place in the job, in the mesh of a plan, and among the batches of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echelon.base.environment import ALONE, worker_rank_info
from echelon.distributed.ps_role import Role
from echelon.distributed.world import World


def identity(world: World) -> dict[str, tuple[int, int]]:
    return {
        "job": (world.rank, world.size),
        "mesh": (world.mesh_rank, world.mesh_size),
        "data": (world.data_rank, world.data_size),
    }


def test_one_process_is_all_there_is() -> None:
    world = World(ALONE, torch.device("cpu"), "none", 0, 10.0, None)
    assert identity(world) == {"job": (0, 1), "mesh": (0, 1), "data": (0, 1)}


def test_worker_of_servers_is_alone_in_its_mesh() -> None:
    place = replace(worker_rank_info(2, 5, {}), local_world_size=3)
    world = World(place, torch.device("cpu"), "gloo", 0, 10.0, None, Role("worker", 2, ("a:1",), 5))
    assert identity(world) == {"job": (2, 5), "mesh": (0, 1), "data": (2, 5)}
    assert world.ranks_per_host == 1
    group: Any = object()
    bound = replace(world, control=group)  # after bind(), workers form a process group
    assert identity(bound) == {"job": (2, 5), "mesh": (2, 5), "data": (2, 5)}
    assert bound.ranks_per_host == 3
    assert identity(bound.without_collectives()) == identity(world)


def test_ranks_of_one_split_read_one_batch() -> None:
    group: Any = object()
    world = World(worker_rank_info(3, 4, {}), torch.device("cpu"), "gloo", 0, 10.0, group)
    assert identity(world.reading(1, 2)) == {"job": (3, 4), "mesh": (3, 4), "data": (1, 2)}
