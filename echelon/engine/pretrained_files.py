"""Saves the weights of a run as the directory of a model that the hub's libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from echelon.checkpoint.region_tensor import region_tensors
from echelon.checkpoint.training_state import model_aliases

if TYPE_CHECKING:
    from echelon.distributed.local_state import LocalState
    from echelon.distributed.world import World


def save_model_directory(
    directory: str | Path,
    local_state: LocalState,
    world: World,
    is_sharded: bool,
    max_shard_size: str | float,
    dtype: torch.dtype | str | None,
) -> Path:
    """Write the model of a run to ``directory``; see ``Engine.save_pretrained``.

    is_sharded: True if ranks hold parts of the model
    """
    from echelon.checkpoint.rank_agreement import SavePeers
    from echelon.engine.rank_regions import RankRegions
    from echelon.hf.merged_adapters import merge_model
    from echelon.hf.save_pretrained import FileOptions, save_pretrained

    if world.rank >= world.mesh_size:  # of the workers of parameter servers, the first one writes
        return Path(directory).expanduser().absolute()
    source = RankRegions(
        local_state.tensors(), local_state.contributes, world.mesh_rank, world.control if is_sharded else None
    )
    peers = SavePeers(world.mesh_rank, world.mesh_size, world.control, world.timeout)
    options = FileOptions(max_shard_size, dtype)
    try:
        merged = merge_model(local_state.model, region_tensors(source), model_aliases(local_state.model))
        return save_pretrained(directory, *merged, options, peers, source.receive)
    finally:
        peers.close()
