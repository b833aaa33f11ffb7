"""``save_pretrained``: the directory of a model, as the libraries of the hub read it, from the parts of all ranks."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.quantities import quantity
from echelon.checkpoint import dtypes
from echelon.checkpoint.directory_swap import keep_others, staging_path, swap_in, sweep_leftovers
from echelon.checkpoint.os_errors import cannot_write
from echelon.checkpoint.rank_agreement import SavePeers
from echelon.checkpoint.region_tensor import RegionTensor
from echelon.checkpoint.sharded_files import ShardedFiles, is_weight_file
from echelon.hf.stored_names import is_transformers_model, library_class, stored_tensors

#: Files of the model's origin that are not copied: weights in any format, and what describes the origin alone.
_NOT_COPIED = (
    *("safetensors", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx", "gguf", "tflite", "ot", "npz", "index.json"),
    *("lock", "incomplete"),
)


@dataclass(frozen=True)
class FileOptions:
    """Options of the weight files.

    max_shard_size: largest size of a file, as bytes or as ``"5 GB"``
    dtype:          dtype of floating-point weights, or its name; None for their own
    """

    max_shard_size: str | float = "5 GB"
    dtype: torch.dtype | str | None = None

    @property
    def limit(self) -> int:
        return int(quantity(self.max_shard_size, "bytes", "max_shard_size"))

    @property
    def kind(self) -> torch.dtype | None:
        found = dtypes.dtype_named(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if self.dtype is not None and (found is None or not found.is_floating_point):
            raise UsageError(f"dtype={self.dtype} is no dtype of weights; give 'bfloat16', 'float16' or 'float32'")
        return found


def save_pretrained(
    directory: str | Path,
    model: nn.Module,
    tensors: Mapping[str, RegionTensor],
    aliases: Mapping[str, str],
    options: FileOptions,
    peers: SavePeers,
    receive: Callable[[int], object],
) -> Path:
    """Write the model to ``directory``, complete or not at all, and return its path. All ranks call it together.

    model:    model whose config, generation config and origin are written beside the weights
    tensors:  whole tensors by name, tied ones once; the receiving rank reads their values, others read ``meta``
    aliases:  second names of tied weights
    peers:    ranks that take part
    receive:  called with the rank that gets the values of the reads that follow
    """
    target = Path(directory).expanduser().absolute()
    doing = f"saving {target}"
    stored = stored_tensors(model, tensors, aliases)
    files = ShardedFiles(stored, options.kind, options.limit)
    name = peers.agree(doing, lambda: [str(target), list(stored)], lambda offers: _open(target, offers))
    staged = target.with_name(name)
    try:
        peers.agree(
            doing,
            lambda: files.write(staged, peers.rank, peers.world_size, receive),
            lambda _: _complete(files, model, staged, target),
        )
    except CheckpointError:
        if peers.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return target


def _open(target: Path, offers: list[Any]) -> str:
    """Create the directory to write to, on rank 0, and return its name."""
    for rank, offer in enumerate(offers):
        if offer != offers[0]:
            raise CheckpointError(
                f"rank {rank} saves to {offer[0]} or has other weights; call save_pretrained together"
            )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a directory")
    staged = staging_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(target)
        staged.mkdir()
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from None
    return staged.name


def _complete(files: ShardedFiles, model: nn.Module, staged: Path, target: Path) -> None:
    """Write what belongs beside the weights, and give the directory its name, on rank 0."""
    files.refuse_unseen(staged)
    try:
        files.write_index(staged)
        write_settings(model, staged, files.dtype)
        if target.is_dir():
            keep_others(target, staged, is_weight_file)
        swap_in(staged, target)
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from None


def write_settings(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the config and the generation config of a model, and copy the tokenizer's files from its origin."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    if is_transformers_model(model):
        config = copy.deepcopy(config)
        config.architectures = [library_class(model).__name__]
        config.dtype = dtypes.name_of(dtype or model.dtype)
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)
    copy_companions(getattr(model, "name_or_path", None), folder)


def copy_companions(origin: str | None, folder: Path) -> None:
    """Copy what lies beside the weights of the model's origin: tokenizer, templates, processors, code, license."""
    if not origin or not Path(origin).is_dir():
        return
    for path in sorted(Path(origin).iterdir()):
        is_copied = path.is_file() and not path.name.startswith((".", "README")) and not path.name.endswith(_NOT_COPIED)
        if is_copied and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
