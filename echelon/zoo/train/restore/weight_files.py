"""Read weights by name from echelon's checkpoints, torch files, safetensors files, and sharded sets of these.

Files may be untrusted. No code in them is executed: torch files are loaded with ``weights_only=True``, and an index may
not name files outside its folder.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import CheckpointError, first_line
from echelon.checkpoint import Stored, find
from echelon.checkpoint.os_errors import cannot_read

#: Keys under which files of training scripts have the weights.
_WITHIN = ("state_dict", "model_state_dict", "model", "module", "weights")

#: Prefixes that wrappers add to every name: DataParallel, torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")

_SUFFIXES = ".safetensors, .pt, .pth, .bin, an index (.index.json) or a checkpoint of Echelon"

Weights = dict[str, Tensor]


def read_file(path: Path) -> Weights:
    """Return all weights in ``path``, which is a file or the folder of a checkpoint."""
    if path.is_dir():
        return _checkpoint(path)
    if path.name.endswith(".index.json"):
        return _set(path)
    if path.suffix == ".safetensors":
        return _unwrapped(_safetensors(path))
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _unwrapped(_torch_file(path))
    raise CheckpointError(f"'{path}' is no file of weights that can be read; give {_SUFFIXES}")


# ---- checkpoints of echelon ----


def _checkpoint(path: Path) -> Weights:
    stored = Stored(find(path))
    held = [name for name in stored.names() if name.startswith("model.")]
    weights = {name.removeprefix("model."): stored.read(name) for name in held}
    aliases = stored.facts.get("aliases")
    for second, first in aliases.items() if isinstance(aliases, dict) else ():
        if first in weights:
            weights[second] = weights[first]
    return weights


# ---- other files ----


def _safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise cannot_read(path, error) from None
    except SafetensorError as error:
        raise CheckpointError(_damaged(path, error)) from None


def _torch_file(path: Path) -> Weights:
    try:
        mapped = zipfile.is_zipfile(path)  # files of older torch versions are not zip archives and cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise cannot_read(path, error) from None
    except Exception as error:
        raise CheckpointError(_refused(path, error)) from None
    return _state(content, path)


def _refused(path: Path, error: Exception) -> str:
    """Return the message for a damaged file, or for one with Python objects, whose construction could run code."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    if match is None:
        return _damaged(path, error)
    return (
        f"'{path}' holds a Python object ({match[1]}), and loading it could run any code; if you trust the file, save "
        "its weights alone: torch.save(model.state_dict(), ...)"
    )


def _damaged(path: Path, error: Exception) -> str:
    return f"'{path}' is truncated, damaged or of another format ({first_line(error, typed=True)[:120]}); copy it again"


def _state(content: Any, path: Path) -> Weights:
    """Return the weights, which may be nested in dicts."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"'{path}' holds {type(content).__name__}; it must hold weights by name")
    for key in _WITHIN:
        if isinstance(content.get(key), Mapping):
            return _state(content[key], path)
    weights = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        found = ", ".join(f"'{name}'" for name in list(content)[:5]) or "nothing"
        raise CheckpointError(f"'{path}' holds no weights, but {found}; they are looked for in {', '.join(_WITHIN)}")
    return weights


def _unwrapped(weights: Weights) -> Weights:
    for prefix in _WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            return _unwrapped({name.removeprefix(prefix): value for name, value in weights.items()})
    return weights


# ---- sharded sets ----


def _set(path: Path) -> Weights:
    """Return the weights of all files that an index names."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in places.values()})
    except OSError as error:
        raise cannot_read(path, error) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"'{path}' is no index of weights ({first_line(error, typed=True)[:120]}); copy it again"
        ) from None
    weights: Weights = {}
    for file in files:
        weights |= read_file(_beside(path, file))
    missing = sorted(set(places) - set(weights))
    if missing:
        raise CheckpointError(
            f"'{path}' names '{missing[0]}', but '{places[missing[0]]}' does not hold it; copy both again"
        )
    return _unwrapped({name: weights[name] for name in places})


def _beside(index: Path, file: str) -> Path:
    if Path(file).name != file or file.endswith(".index.json"):
        raise CheckpointError(f"'{index}' names the file '{file[:100]}'; it may only name files of weights beside it")
    path = index.with_name(file)
    if not path.is_file():
        raise CheckpointError(f"'{index}' names the file '{file}', and it is not there; copy the whole set")
    return path
