"""Reads and writes adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.base.errors import CheckpointError, UsageError, first_line
from echelon.base.json_head import MalformedHeadError, parse_object
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory import sync_directory
from echelon.checkpoint.os_errors import cannot_read, cannot_write
from echelon.checkpoint.tensorfile import TensorSlot
from echelon.parallel.lora.layer import AdaptedLayer, adapted_layers
from echelon.parallel.lora.targets import matches, shortened
from echelon.strategy import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Prefix of all names in PEFT's files.
PREFIX = "base_model.model."

#: Settings of PEFT under which an adapter computes something else; all of them are off by default.
_OTHERS = ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication", "target_parameters", "lora_bias",
           "trainable_token_indices", "use_qalora", "alora_invocation_tokens", "exclude_modules",
           "layers_to_transform")  # fmt: skip

#: PEFT's tasks by the end of a model's class name; PEFT adds modules of its own to other tasks.
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class AdapterFile:
    """An adapter that was read from a directory."""

    path: Path
    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    rank_scaling: bool
    modules_to_save: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def check(self, lora: Lora) -> None:
        """Raise UsageError if the settings ask for another rank, scale or set of trained modules."""
        requested = {"rank": lora.rank, "alpha": lora.alpha, "modules_to_save": lora.modules_to_save or None}
        for name, value in requested.items():
            if value is not None and value != getattr(self, name):
                raise UsageError(
                    f"lora: the adapter in '{self.path}' has {name} {getattr(self, name)}, and Lora({name}={value!r}) "
                    f"was given; leave {name} out, or begin without weights="
                )

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Copy the adapter into the adapted ``model``. Raises CheckpointError unless it is for these very layers."""
        state = model.state_dict(keep_vars=True)
        wanted = {name: state[name] for name in saved_names(model, self.modules_to_save, state)}
        missing, left = sorted(set(wanted) - set(self.tensors)), sorted(set(self.tensors) - set(wanted))
        if missing or left:
            what = f"it has no '{missing[0]}'" if missing else f"the model has no place for its '{left[0]}'"
            raise CheckpointError(
                f"lora: the adapter in '{self.path}' is for other layers: {what}; give the model and the targets that "
                "it was trained with"
            )
        for name, tensor in wanted.items():
            if tensor.shape != self.tensors[name].shape:
                raise CheckpointError(
                    f"lora: the adapter in '{self.path}' is for another model: '{name}' has the shape "
                    f"{list(self.tensors[name].shape)}, and the model has {list(tensor.shape)}"
                )
        for name, tensor in wanted.items():
            tensor.copy_(self.tensors[name])


def saved_names(model: nn.Module, modules_to_save: Sequence[str], state: Iterable[str]) -> list[str]:
    """Return the names of ``state``, those of a state dict, that belong to the files of the model's adapter."""
    own = {name for layer in adapted_layers(model) for name in (layer.a, layer.b)}
    whole = tuple(f"{name}." for name, _ in model.named_modules() if matches(name, tuple(modules_to_save)))
    return [name for name in state if name in own or name.startswith(whole)]


# ---- reading ----


def read_adapter(directory: str | Path) -> AdapterFile:
    """Read a directory that PEFT or ``save_adapter`` wrote. No code in it is executed."""
    path = Path(directory)
    config = _read_config(path)
    if str(config.get("peft_type")).rpartition(".")[2] != "LORA":
        raise CheckpointError(f"lora: '{path}' holds an adapter of the kind {config.get('peft_type')!r}; give a LORA")
    other = next((name for name in _OTHERS if config.get(name)), None) or ("bias" if _has_bias(config) else None)
    if other is not None:
        raise CheckpointError(
            f"lora: the adapter in '{path}' has {other}={config[other]!r}, which Lora does not have; load it with peft "
            "and give that model to distribute()"
        )
    values: tuple[Any, ...] = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    rank, alpha, targets = values
    named = isinstance(targets, list) and targets and all(isinstance(each, str) for each in targets)
    fits = type(rank) is int and rank > 0 and isinstance(alpha, int | float) and alpha > 0
    if not fits or not (named or isinstance(targets, str)):
        raise CheckpointError(
            f"lora: '{path / CONFIG}' has r={rank!r}, lora_alpha={alpha!r}, target_modules={targets!r}; expected "
            "numbers above 0 and names of modules"
        )
    saved = config.get("modules_to_save") or []
    return AdapterFile(
        path=path,
        rank=rank,
        alpha=float(alpha),
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
        rank_scaling=bool(config.get("use_rslora")),
        modules_to_save=tuple(str(name) for name in saved),
        tensors={name.removeprefix(PREFIX): tensor for name, tensor in _read_weights(path / WEIGHTS).items()},
    )


def _has_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("bias", "none") != "none")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return parse_object((path / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"lora: '{path}' holds no adapter: cannot read {CONFIG}: {error.strerror}; give a directory that "
            "save_adapter() or peft wrote"
        ) from None
    except (MalformedHeadError, UnicodeDecodeError) as error:
        raise CheckpointError(f"lora: '{path / CONFIG}' is damaged ({error}); copy it again") from None


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise cannot_read(path, error) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"lora: '{path}' is truncated or damaged ({first_line(error, typed=True)[:120]}); copy it again"
        ) from None


# ---- writing ----


def write_adapter(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter; a directory that has one already has the old or the new files, never a part of one.

    tensors: by the names that PEFT gives them
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    slots = []
    for name in names:
        kind, shape = dtypes.exported_as(tensors[name].dtype, tuple(tensors[name].shape))
        slots.append(TensorSlot(name, kind, shape, tensors[name].nbytes))
    aside = [directory / f".{name}.writing" for name in (WEIGHTS, CONFIG)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tensorfile.write(aside[0], slots, (dtypes.bytes_of(tensors[name]) for name in names), note={"format": "pt"})
        tensorfile.write_whole(aside[1], json.dumps(dict(config), indent=2, sort_keys=True).encode())
        for path, name in zip(aside, (WEIGHTS, CONFIG), strict=True):
            path.rename(directory / name)
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(cannot_write(directory, error)) from None
    finally:
        for path in aside:
            path.unlink(missing_ok=True)


def peft_config(model: nn.Module, lora: Lora, layers: Sequence[AdaptedLayer]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for a model that ``Strategy(lora=...)`` has adapted."""
    kind = next((base.__name__ for base in type(model).__mro__ if base.__module__.startswith("transformers.")), "")
    alpha = lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in _TASKS.items() if kind.endswith(end)), None),
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", "") or None,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha is not None and alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "target_modules": shortened([layer.name for layer in layers], model),
        "modules_to_save": list(lora.modules_to_save) or None,
        "use_rslora": lora.rank_scaling,
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }
