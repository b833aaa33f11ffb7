"""What a run on a GPU has really held, where it costs nothing to know: the allocator's peak, and what is there.

What autograd kept is not told apart from what computing needed: both are the rest of the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from echelon.record.facts import Footprint, ModuleBytes
from echelon.record.files import MEMORY, write_whole
from echelon.record.parse import json_file

#: Of a whole model, a row for each of so many modules at most: of large ones only those that hold most.
ROWS = 200


def measured(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], peak: int) -> Footprint:
    """``peak``: bytes that were allocated at most."""
    rows = _rows(model, {p: state for optimizer in optimizers for p, state in optimizer.state.items()})
    held = {kind: sum(getattr(row, kind) for row in rows) for kind in ("parameters", "gradients", "optimizer")}
    buffers = sum(row.buffers for row in rows)
    rest = max(0, peak - sum(held.values()) - buffers)
    shown = sorted(rows, key=lambda row: -(row.parameters + row.optimizer))[:ROWS]
    return Footprint(
        peak=peak,
        moment="",
        kinds={**held, "activations": rest, "buffers": buffers},
        modules=tuple(row for row in rows if row in shown) if len(rows) > ROWS else tuple(rows),
        savings=(),
        measured=True,
    )


def write_measured(directory: Path, found: Footprint) -> None:
    """Beside the run's other files; what 'echelon memory --save' has written there stays."""
    earlier = Footprint.of(json_file(directory / MEMORY))
    if earlier is None or earlier.measured:
        write_whole(directory / MEMORY, found.to_json())


def _rows(model: nn.Module, states: Mapping[Tensor, Mapping[str, object]]) -> list[ModuleBytes]:
    seen: set[int] = set()  # tied weights are there once
    rows = []
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen |= {id(p) for p in own}
        held = [
            sum(_bytes(p) for p in own),
            sum(_bytes(p.grad) if p.grad is not None else _bytes(p) * p.requires_grad for p in own),
            sum(_bytes(value) for p in own for value in states.get(p, {}).values()),
        ]
        buffers = sum(_bytes(value) for value in module._buffers.values())
        if any(held) or buffers:
            rows.append(ModuleBytes(name or "(model)", held[0], held[1], held[2], 0, buffers))
    return rows


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
