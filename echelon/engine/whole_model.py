"""Gathers the full state dict of the model from the parts that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.training_state import model_aliases
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import gather_json
from echelon.distributed.local_state import LocalState
from echelon.distributed.tensor_layout import Layout, Part, local_tensor


@torch.no_grad()
def whole_state(local_state: LocalState, control: dist.ProcessGroup | None, is_sharded: bool) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name, whole, in host memory, on every rank. All ranks call it.

    Tied weights appear under each of their names, as in ``state_dict()``.
    """
    return assembled_state(local_state, local_state.tensors(), control if is_sharded else None)


@torch.no_grad()
def assembled_state(
    local_state: LocalState, local: dict[str, Tensor | Part], control: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the full state of which this rank holds ``local``; ``control=None`` means that ``local`` is complete."""
    result = put_together(local, local_state.contributes, control)
    return result | {second: result[first] for second, first in model_aliases(local_state.model).items()}


@torch.no_grad()
def put_together(
    local: dict[str, Tensor | Part], contributes: Collection[str], control: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return whole tensors from the parts of all ranks.

    local:       tensors and parts that this rank holds
    contributes: names that this rank contributes
    control:     process group of all ranks; None if ``local`` is complete
    """
    if control is None:
        return {name: local_tensor(value).cpu().clone() for name, value in local.items()}
    spoken = {name: value for name, value in local.items() if name in contributes}
    offers = gather_json({name: _facts(value) for name, value in spoken.items()}, control)
    merged: dict[str, Any] = {name: facts for offer in reversed(offers) for name, facts in offer.items()}
    return {name: _assembled(name, facts, spoken, control) for name, facts in sorted(merged.items())}


def _assembled(name: str, facts: list[Any], spoken: dict[str, Tensor | Part], control: dist.ProcessGroup) -> Tensor:
    """Gather one tensor by all-reduce: each piece comes from one rank, and the other ranks contribute zeros.

    The tensor is summed as bytes, so that every dtype is exact.
    """
    shape, dtype = tuple(facts[0]), getattr(torch, facts[1])
    whole = torch.zeros(shape, dtype=dtype)
    if name in spoken:
        value = spoken[name]
        layout = value.layout if isinstance(value, Part) else Layout(shape)
        for region, view in Part(local_tensor(value).cpu(), layout).regions(name):
            region.view_of(whole).copy_(view)
    if math.prod(shape):
        raw = whole.reshape(-1).view(torch.uint8)
        with waiting("whole state", name, control):
            dist.all_reduce(raw, group=control)
        whole = raw.view(dtype).reshape(shape)
    return whole


def _facts(value: Tensor | Part) -> list[Any]:
    shape = value.layout.shape if isinstance(value, Part) else tuple(value.shape)
    return [list(shape), str(local_tensor(value).dtype).removeprefix("torch.")]
