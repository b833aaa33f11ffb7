"""Gathers the adapters of a model from all ranks and writes them in PEFT's format."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.collectives import gather_json
from echelon.distributed.local_state import LocalState
from echelon.distributed.world import World
from echelon.engine.whole_model import put_together
from echelon.parallel.lora.adapter_files import PREFIX, peft_config, saved_names, write_adapter
from echelon.parallel.lora.layer import adapted_layers
from echelon.plan import Plan


def save_adapter(model: nn.Module, plan: Plan, local_state: LocalState, world: World, directory: Path) -> Path:
    """Write the adapters of ``model`` from rank 0; all ranks return, or raise, after the files are complete."""
    if plan.lora is None and not hasattr(model, "peft_config"):
        raise UsageError("save_adapter: the model has no adapters; use Strategy(lora=True), or a model of peft")
    tensors = local_state.tensors()
    local = {name: tensors[name] for name in _names_to_save(model, plan, tensors)}
    is_sharded = plan.is_model_parallel or plan.shard is not None
    whole = put_together(local, local_state.contributes, world.control if is_sharded else None)
    failed = ""
    if world.rank == 0:
        try:
            config, content = _content(model, plan, whole)
            write_adapter(directory, config, content)
        except Exception as error:
            if world.control is None:
                raise
            failed = str(error)
    if world.control is not None:
        failed = str(gather_json(failed, world.control)[0])
    if failed:
        raise UsageError(f"save_adapter: {failed}")
    return directory


def _names_to_save(model: nn.Module, plan: Plan, state: Iterable[str]) -> list[str]:
    """Return the names of the tensors to gather; with peft, more than the adapters, of which peft then chooses."""
    if plan.lora is not None:
        return saved_names(model, plan.lora.modules_to_save, state)
    trained = {spec.name for spec in plan.model if spec.trainable}
    return [name for name in state if name in trained or "lora_" in name or ".modules_to_save." in name]


def _content(
    model: nn.Module, plan: Plan, whole: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of the files."""
    if plan.lora is not None:
        config = peft_config(model, plan.lora, list(adapted_layers(model)))
        return config, {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    peft = importlib.import_module("peft")  # it has made the model, so it is there
    made: Any = model
    name = made.active_adapter
    settings = made.peft_config[name].to_dict()
    for key, value in settings.items():
        settings[key] = sorted(value) if isinstance(value, set) else getattr(value, "value", value)
    tensors = peft.get_peft_model_state_dict(made, dict(whole), adapter_name=name, save_embedding_layers=False)
    return {**settings, "inference_mode": True}, {key: value.to(torch.device("cpu")) for key, value in tensors.items()}
