"""Writes a checkpoint of Echelon as the directory of a model; the work of ``echelon export --format hf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from echelon.base.console import say
from echelon.base.errors import CheckpointError
from echelon.checkpoint import Stored, find
from echelon.checkpoint.rank_agreement import SavePeers
from echelon.checkpoint.region_tensor import RegionTensor, region_tensors
from echelon.checkpoint.stored_weights import StoredWeights
from echelon.distributed.world import DEFAULT_TIMEOUT
from echelon.hf.merged_adapters import merge
from echelon.hf.save_pretrained import FileOptions, save_pretrained
from echelon.hf.transformers_library import model_class, name_origin, quiet, read_config, transformers_library
from echelon.parallel.lora.layer import AdaptedLayer


def export_model_directory(
    checkpoint: str | Path, out: str | Path, config: str | Path | None, ema: bool, options: FileOptions
) -> tuple[Path, int]:
    """Write a checkpoint's weights to the directory ``out``; return the checkpoint's path and the number of tensors.

    config: directory of the model that the training began from; None to write weights only
    ema:    True to write the averaged weights where there are some
    """
    stored = Stored(find(checkpoint))
    source = StoredWeights(stored, ema=ema)
    tensors = merge(region_tensors(source), _adapters(stored))
    model: nn.Module = nn.Module() if config is None else _skeleton(Path(config).expanduser(), source, tensors)
    if config is None:
        say("export: without --config DIR the directory gets weights only, under the names of the module")
    peers = SavePeers(0, 1, None, DEFAULT_TIMEOUT)
    save_pretrained(out, model, tensors, source.aliases, options, peers, lambda rank: None)
    return source.path, len(tensors)


def _adapters(stored: Stored) -> list[AdaptedLayer]:
    """Return the layers that have an adapter of ``Strategy(lora=...)`` in a checkpoint."""
    return [AdaptedLayer(*values) for values in stored.facts.get("adapters", ())]


def _skeleton(folder: Path, source: StoredWeights, tensors: Mapping[str, RegionTensor]) -> nn.Module:
    """Return the model of a directory without memory for its weights. Raises unless the checkpoint is of that model."""
    transformers = transformers_library("export --format hf --config")
    with quiet(transformers):
        config = read_config(transformers, folder)
        kind, config = model_class(transformers, config, None, folder)
        with torch.device("meta"):
            model: nn.Module = kind(config)
        name_origin(transformers, model, folder)
    here = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    there = {name: tuple(value.shape) for name, value in tensors.items()}
    there |= {second: there[first] for second, first in source.aliases.items()}
    odd = sorted(set(here) ^ set(there)) or [name for name in here if here[name] != there[name]]
    if odd:
        raise CheckpointError(
            f"{source.path} is no checkpoint of the {kind.__name__} of {folder}: {len(odd)} weights differ, such as "
            f"'{odd[0]}', {_words(there.get(odd[0]))} there and {_words(here.get(odd[0]))} in the model; give --config "
            "the directory that the training began from"
        )
    return model


def _words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
