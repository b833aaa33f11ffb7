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
def whole_state(holdings: LocalState, control: dist.ProcessGroup | None, is_sharded: bool) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name, whole, in host memory, on every rank. All ranks call it.

    Tied weights appear under each of their names, as in ``state_dict()``.
    """
    return assembled_state(holdings, holdings.tensors(), control if is_sharded else None)


@torch.no_grad()
def assembled_state(
    holdings: LocalState, mine: dict[str, Tensor | Part], control: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the full state of which this rank holds ``mine``; ``control=None`` means that ``mine`` is complete."""
    found = put_together(mine, holdings.speaks, control)
    return found | {second: found[first] for second, first in model_aliases(holdings.model).items()}


@torch.no_grad()
def put_together(
    mine: dict[str, Tensor | Part], speaks: Collection[str], control: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return whole tensors from the parts of all ranks.

    mine:    tensors and parts that this rank holds
    speaks:  names that this rank contributes
    control: process group of all ranks; None if ``mine`` is complete
    """
    if control is None:
        return {name: local_tensor(value).cpu().clone() for name, value in mine.items()}
    spoken = {name: value for name, value in mine.items() if name in speaks}
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
