"""Measures the memory of a rank: the bytes of its tensors, and on a GPU the allocator's peak.

Saved activations and temporary buffers are not distinguished: both are the rest of the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.distributed.local_state import LocalState, local_parameters
from echelon.observability.runlog.log_files import memory_file, write_whole
from echelon.observability.runlog.rank_names import place_in_words
from echelon.observability.runlog.run_metadata import BETWEEN, Footprint, ModuleBytes
from echelon.plan.fake_forward import is_placeholder

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView

#: Most modules with a row of their own; in larger models only the modules with the most memory have one.
ROWS = 200


def write_measured_memory(engine: EngineView, directory: Path) -> None:
    """Write the memory of this rank into the run's directory."""
    local_state, device = engine.local_state, engine.world.device
    if local_state is None:
        return
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    place = place_in_words(engine.place, engine.plan.mesh, engine.plan.stages.stages if engine.plan.stages else 1)
    found = measured(local_state, engine.optimizers.values(), peak, engine.world.rank, place)
    write_whole(directory / memory_file(engine.world.rank), found.to_json())


def measured(
    local_state: LocalState,
    optimizers: Iterable[torch.optim.Optimizer],
    peak: int | None,
    rank: int = 0,
    place: str = "",
) -> Footprint:
    """Return the footprint of a rank.

    peak: peak of allocated bytes; None if only the memory between two steps is known
    """
    rows = _rows(local_state, {p: state for optimizer in optimizers for p, state in optimizer.state.items()})
    kinds = {kind: sum(getattr(row, kind) for row in rows) for kind in ("parameters", "gradients", "optimizer")}
    buffers = sum(row.buffers for row in rows)
    rest = 0 if peak is None else max(0, peak - sum(kinds.values()) - buffers)
    shown = sorted(rows, key=lambda row: -(row.parameters + row.optimizer))[:ROWS]
    return Footprint(
        peak=sum(kinds.values()) + buffers if peak is None else peak,
        moment=BETWEEN if peak is None else "",
        kinds={**kinds, "activations": rest, "buffers": buffers},
        modules=tuple(row for row in rows if row in shown) if len(rows) > ROWS else tuple(rows),
        savings=(),
        measured=True,
        ranks=(rank,),
        place=place,
    )


def _rows(local_state: LocalState, states: Mapping[Tensor, Mapping[str, object]]) -> list[ModuleBytes]:
    names = {
        id(parameter): name for name, parameter in local_parameters(local_state.model).items()
    }  # tied weights once
    rows = []
    for name, module in local_state.model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and names.pop(id(p), None) is not None]
        known = dict(zip(own, _held(local_state, own), strict=True))
        held = [
            sum(_bytes(tensor) for p, shard in known.items() for tensor in _memory(p, shard)),
            sum(_bytes(tensor.grad) for p, shard in known.items() for tensor in {p, shard}),
            sum(_bytes(value) for shard in known.values() for value in states.get(shard, {}).values()),
        ]
        buffers = sum(_bytes(value) for value in module._buffers.values() if not is_placeholder(value))
        if any(held) or buffers:
            rows.append(ModuleBytes(name or "(model)", held[0], held[1], held[2], 0, buffers))
    return rows


def _held(local_state: LocalState, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield for each parameter the tensor that optimizers update: the parameter, or this rank's shard of it."""
    names = {id(parameter): name for name, parameter in local_state.model.named_parameters()}
    return (local_state.parameters.get(names[id(parameter)], parameter) for parameter in parameters)


def _memory(parameter: nn.Parameter, shard: nn.Parameter) -> Iterator[Tensor]:
    """Yield those of the two that have memory of their own.

    A shard may be a view of the parameter, and a parameter that is not gathered has the memory of one number.
    """
    storage = parameter.untyped_storage()
    if storage.nbytes() >= _bytes(parameter):
        yield parameter
    if shard.untyped_storage().data_ptr() != storage.data_ptr():
        yield shard


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
