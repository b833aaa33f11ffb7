"""``from_pretrained``: a model of transformers whose weights stay in their files until a rank reads its parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from echelon.base.console import say
from echelon.base.errors import CheckpointError, EchelonError, one_line
from echelon.checkpoint.region_tensor import RegionTensor, region_tensors
from echelon.checkpoint.safetensors_source import SafetensorsSource
from echelon.construction.weight_recipe import stored_parameter
from echelon.distributed.main_process import is_main_process
from echelon.hf.tokenizer_fit import tokenizer_misfit
from echelon.hf.transformers_library import model_class, name_origin, quiet, read_config, transformers_library

_NAMED = 3  # weights that a line names


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    cls: Any = None,
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    deferred: bool = True,
    **options: Any,
) -> nn.Module:
    """Return the model of a directory that ``save_pretrained`` or the hub's downloader wrote.

    Names, tied weights and conversions are those of the installed transformers; the files are read here, region by
    region. A line says which weights the files lack, and which of theirs the model does not have. The model is in
    training mode. Until ``distribute()`` its parameters are on ``meta``, without values.

    path:    directory with ``config.json`` and safetensors files, one or many with an index
    cls:     class of transformers, or one of its Auto classes; default: the class that saved the model
    config:  config to build the model from, such as the directory's with another number of labels; default: the
             directory's
    dtype:   dtype of the weights, or its name; default: that of the files
    deferred: False to read all weights now, whole
    options: further options of the class's own ``from_pretrained``, such as ``attn_implementation="eager"``

    >>> model = echelon.hf.from_pretrained("models/llama", dtype=torch.bfloat16)
    >>> engine = echelon.distribute(model, torch.optim.AdamW(model.parameters()), strategy=echelon.Strategy(shard=3))
    """
    folder = Path(path).expanduser()
    transformers = transformers_library(f"reading the model {folder}")
    # echelon.deferred() would record the empty tensors here as initial weights
    with quiet(transformers), _disable_current_modes():
        config = config or read_config(transformers, folder)
        _refuse_quantized(folder, config)
        source = SafetensorsSource(folder)
        kind, config = model_class(transformers, config, cls, folder)
        model, notes = _unread_model(folder, kind, config, source, dtype, options)
    _refuse_misfits(folder, model, notes)
    if is_main_process():
        for line in _lines(folder, model, notes):
            say(line)
    name_origin(transformers, model, folder)
    with _disable_current_modes():
        _replace_regions(model, deferred)
    model.train()
    return model


def _unread_model(
    folder: Path, kind: Any, config: Any, source: SafetensorsSource, dtype: Any, options: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the model with region tensors as its weights, and what transformers has noted about names.

    The library's own loading runs on tensors that are read later, so its renaming, fusing of experts, tying and
    initialization of what is missing hold for every architecture that it has.
    """
    if dtype is not None:
        options = {**options, "dtype": dtype}
    try:
        model, notes = kind.from_pretrained(
            None,
            config=config,
            state_dict=region_tensors(source),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in one line
            **options,
        )
    except EchelonError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load {folder} as {kind.__name__}: {one_line(error, typed=True)}; "
            "see that the directory, cls= and the options fit together"
        ) from error
    return model, notes


def _refuse_quantized(folder: Path, config: Any) -> None:
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise CheckpointError(
            f"{folder} is quantized ({method}), and its weights cannot be read as those of the model; give the "
            "directory of the model in 16 or 32 bits"
        )


def _refuse_misfits(folder: Path, model: nn.Module, notes: Mapping[str, Any]) -> None:
    kind = type(model).__name__
    if mismatched := sorted(notes.get("mismatched_keys", ())):
        name, stored, here = mismatched[0]
        others = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        raise CheckpointError(
            f"{folder} does not fit {kind}: '{name}' is {list(stored)} in its files and {list(here)} by its "
            f"config.json{others}; config.json and weights must be of one model"
        )
    if errors := notes.get("error_msgs") or notes.get("conversion_errors"):
        raise CheckpointError(
            f"{folder}: transformers cannot convert its weights: {' '.join(str(errors).split())[:300]}"
        )
    if not any(isinstance(value, RegionTensor) for value in model.parameters()):
        raise CheckpointError(
            f"{folder} holds no weight of {kind}: it has {_some(notes['unexpected_keys'])}, the model "
            f"{_some(notes['missing_keys'])}; it is the model of another architecture, give its own config.json"
        )


def _lines(folder: Path, model: nn.Module, notes: Mapping[str, Any]) -> Iterable[str]:
    if missing := sorted(notes["missing_keys"]):
        yield f"hf: {folder} lacks {_some(missing)}; {'it begins' if len(missing) == 1 else 'they begin'} at random"
    if unexpected := sorted(notes["unexpected_keys"]):
        yield f"hf: {folder} also has {_some(unexpected)}, which the model does not use"
    words = getattr(model.config, "vocab_size", None)
    if isinstance(words, int) and (misfit := tokenizer_misfit(folder, words)):
        yield misfit


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in found[:_NAMED]) + more if found else "none"


def _replace_regions(model: nn.Module, deferred: bool) -> None:
    """Replace region tensors by tensors with values, or by parameters to be read later. Tied weights stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in groups:
            for name, value in held.items():
                if isinstance(value, RegionTensor):
                    if id(value) not in made:
                        made[id(value)] = _made(value, deferred)
                    held[name] = made[id(value)]


def _made(value: RegionTensor, deferred: bool) -> Tensor:
    if not isinstance(value, nn.Parameter):
        return value.read_whole().clone()
    if deferred:
        return stored_parameter(value, value.requires_grad)
    return nn.Parameter(value.read_whole().clone(), value.requires_grad)
