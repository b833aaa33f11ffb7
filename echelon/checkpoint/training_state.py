"""Converts training state to named tensors and JSON facts, as a checkpoint holds them, and back.

model.<name>                          parameters and persistent buffers, each once
optimizer.<optimizer>.<name>.<key>    optimizer state, by parameter name, so that order does not matter
merge.<i>.<n>.<name>                  gradients accumulated but not yet applied, the i-th of n partial sums
dgc.<rank>.<optimizer>.{u,v}.<name>   momentum and gradients that a rank has not sent yet (deep gradient compression)
sync.{snapshot,velocity}.<name>       parameters at the last synchronization, and outer momentum (LocalSGD)
local.<rank>.<any of the first two>   a rank's own state under LocalSGD; model.* is then the average of all
own.<rank>.<name>                     in in-memory snapshots: batch-norm statistics, if every replica has its own
ema.<name>                            moving averages of parameters, and of buffers if those are averaged
rng.<stream>.<generator>              states of random generators; ranks that share a batch share a stream
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.base.errors import CheckpointError
from echelon.base.json_head import read_head, write_head
from echelon.checkpoint.state_strides import follow_weights
from echelon.distributed.local_state import LocalState
from echelon.distributed.tensor_layout import Layout, Part

Optimizers = Mapping[str, torch.optim.Optimizer]


def model_tensors(local_state: LocalState) -> dict[str, Tensor | Part]:
    """Return this rank's parameters and persistent buffers."""
    return {f"model.{name}": value for name, value in local_state.tensors().items()}


def model_aliases(model: nn.Module) -> dict[str, str]:
    """Return the second names of tied weights: ``{"head.weight": "embedding.weight"}``."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in first:
            aliases[name] = first[id(value)]
        first.setdefault(id(value), name)
    return aliases


def optimizer_state(local_state: LocalState, optimizers: Optimizers) -> tuple[dict[str, Tensor | Part], dict[str, Any]]:
    """Return the optimizers' tensors by name, and their options and other values as facts."""
    names = local_state.names
    tensors: dict[str, Tensor | Part] = {}
    facts: dict[str, Any] = {}
    for key, optimizer in optimizers.items():
        values: dict[str, Any] = {}
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for field, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{name}.{field}"] = local_state.part(name, value)
                else:
                    values.setdefault(name, {})[field] = encode(value)
        facts[key] = {"values": values, "groups": optimizer_groups(local_state, key, optimizer)}
    return tensors, facts


def optimizer_groups(local_state: LocalState, key: str, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer, group by group."""
    return [
        {"names": members, "options": encode({k: v for k, v in group.items() if k != "params"})}
        for members, group in zip(local_state.groups[key], optimizer.param_groups, strict=True)
    ]


#: Reads a stored tensor, given its name and the layout of its parameter.
Read = Callable[[str, Layout | None], Tensor]


def restore_optimizers(
    optimizers: Optimizers, local_state: LocalState, facts: Mapping[str, Any], stored: Iterable[str], read: Read
) -> None:
    """Restore the optimizers' state. ``stored`` names the tensors ``optimizer.*``; only those held here are read."""
    if set(optimizers) != set(facts):
        raise CheckpointError(
            f"the checkpoint has optimizers {sorted(facts)}, this run has {sorted(optimizers)}; "
            "build the same ones, under the same names"
        )
    everything = list(stored)
    for key, optimizer in optimizers.items():
        by_name: dict[str, dict[str, Any]] = {}
        prefix = f"optimizer.{key}."
        for full in everything:
            name, _, field = full.removeprefix(prefix).rpartition(".")
            if full.startswith(prefix) and name in local_state.parameters:
                later = functools.partial(read, full, local_state.layouts.get(name))
                by_name.setdefault(name, {})[field] = later if getattr(optimizer, "reads_later", False) else later()
        for name, fields in facts[key]["values"].items():
            by_name.setdefault(name, {}).update({field: decode(value) for field, value in fields.items()})
        _load(key, optimizer, local_state, facts[key]["groups"], by_name)


def _load(
    key: str,
    optimizer: torch.optim.Optimizer,
    local_state: LocalState,
    groups: list[dict[str, Any]],
    by_name: Mapping[str, dict[str, Any]],
) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer '{key}' has {len(optimizer.param_groups)} parameter groups, the checkpoint has {len(groups)}"
        )
    names = local_state.names
    index = 0
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    for group, stored, known in zip(optimizer.param_groups, groups, local_state.groups[key], strict=True):
        if set(known) != set(stored["names"]):
            odd = sorted(set(known) ^ set(stored["names"]))[0]
            raise CheckpointError(f"optimizer '{key}' and the checkpoint disagree about parameter '{odd}'")
        members = [names[id(parameter)] for parameter in group["params"]]
        ids = list(range(index, index + len(members)))
        state |= {i: by_name[name] for i, name in zip(ids, members, strict=True) if name in by_name}
        # The implementation of the step depends on this machine, not on the one that saved.
        here: dict[str, Any] = {name: group[name] for name in ("fused", "foreach") if name in group}
        param_groups.append({**decode(stored["options"]), **here, "params": ids})
        index += len(members)
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})
    follow_weights(optimizer)


def to_bytes(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Serialize a few small tensors and facts quickly: a worker sends them with every push."""
    from echelon.checkpoint.dtypes import bytes_of, name_of

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    shapes = [[name, name_of(value.dtype), list(value.shape)] for name, value in plain.items()]
    head = write_head({"facts": facts, "tensors": shapes})
    return b"".join([head, *(bytes_of(value) for value in plain.values())])


def from_bytes(kept: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts that ``to_bytes`` serialized."""
    from echelon.checkpoint.dtypes import dtype_named, nbytes, tensor_of

    head, at = read_head(kept)
    tensors: dict[str, Tensor] = {}
    for name, kind, shape in head["tensors"]:
        dtype = dtype_named(kind)
        assert dtype is not None
        size = nbytes(dtype, shape)
        tensors[name] = tensor_of(np.frombuffer(kept[at : at + size], np.uint8).copy(), dtype, shape)
        at += size
    return tensors, head["facts"]


def random_state(stream: int, device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random generators, under the number of its stream."""
    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = legacy
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.concatenate([keys, [position, has_gauss]]).astype(np.int64)),
        "numpy_gauss": torch.from_numpy(np.array([gauss], np.float64)),
        **_python_state(random.getstate()),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{stream}.{name}": value for name, value in state.items()}


@functools.lru_cache(maxsize=1)
def _python_state(state: tuple[int, tuple[int, ...], float | None]) -> dict[str, Tensor]:
    """Convert the state of Python's generator; cached because few training steps draw from it."""
    version, internal, gauss = state
    numbers = np.array([version, *internal], np.int64)
    gaussian = np.array([math.nan if gauss is None else gauss], np.float64)
    return {"python": torch.from_numpy(numbers), "python_gauss": torch.from_numpy(gaussian)}


def restore_random_state(stream: int, device: torch.device, stored: Mapping[str, Tensor]) -> None:
    own = {name.removeprefix(f"rng.{stream}."): value for name, value in stored.items()}
    torch.set_rng_state(own["torch"])
    numbers = own["numpy"].tolist()
    keys = np.array(numbers[:-2], dtype=np.uint32)
    np.random.set_state(("MT19937", keys, numbers[-2], numbers[-1], float(own["numpy_gauss"])))
    version, *internal = own["python"].tolist()
    gauss = float(own["python_gauss"])
    random.setstate((version, tuple(internal), None if math.isnan(gauss) else gauss))
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], device)


def encode(value: Any) -> Any:
    """Return a Python value as JSON, with tags for types that JSON lacks. Raises for types that have no tag."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"!tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"!tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        tag = "!counter" if isinstance(value, Counter) else "!dict"
        return {tag: [[encode(key), encode(item)] for key, item in value.items()]}
    raise CheckpointError(f"a checkpoint cannot hold a value of type {type(value).__name__}: {value!r}")


def decode(value: Any) -> Any:
    """Return the Python value that ``encode`` converted."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "!tensor" in value:
        return torch.tensor(value["!tensor"], dtype=getattr(torch, value["dtype"]))
    if "!tuple" in value:
        return tuple(decode(item) for item in value["!tuple"])
    if "!counter" in value:
        return Counter({decode(key): decode(item) for key, item in value["!counter"]})
    return {decode(key): decode(item) for key, item in value["!dict"]}


def merged_facts(ranks: Sequence[dict[str, Any]], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a checkpoint: the facts of each rank, and the facts that are equal on all ranks."""
    optimizers = {
        key: {**of, "values": {name: value for rank in ranks for name, value in rank["values"][key].items()}}
        for key, of in shared["optimizers"].items()  # each rank has the values of the parameters it holds
    }
    alone = [{key: value for key, value in rank.items() if key != "values"} for rank in ranks]
    return {**shared, "ranks": alone, "optimizers": optimizers}
