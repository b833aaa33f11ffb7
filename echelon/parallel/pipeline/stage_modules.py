"""Replace the parameters and buffers that the stages of a rank do not need by fake tensors.

A fake tensor has a shape and dtype but no memory. The model keeps its structure and names, so the user's forward runs
on every rank; its results from fake tensors are fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from echelon.plan.fake_forward import is_placeholder, placeholder
from echelon.plan.stage_trace import StageTrace


def keep_only(model: nn.Module, recording: StageTrace, stages: Sequence[int]) -> None:
    """Replace parameters and buffers that none of ``stages`` needs, and free their memory. Tied names stay tied.

    This must be called before modules are split, synchronized or recomputed, and these must be applied only to modules
    that are kept: a module of another stage still runs to find the shape of its output, without collectives.
    """
    mine = {name for name, holders in recording.holders.items() if not set(holders).isdisjoint(stages)}
    kept = {id(value) for name, value in _first_names(model) if name in mine}
    made: dict[int, Tensor] = {}
    let_go: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in kept and not is_placeholder(parameter):
                let_go[id(parameter)] = parameter
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(placeholder(parameter), requires_grad=False)
                setattr(module, name, made[id(parameter)])  # not in _parameters: recurrent modules keep their own list
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) not in kept and not is_placeholder(buffer):
                module._buffers[name] = made.setdefault(id(buffer), placeholder(buffer))
    for parameter in let_go.values():  # an optimizer may still refer to it
        parameter.data, parameter.grad = parameter.data.new_empty(0), None


def holds(module: nn.Module) -> bool:
    """Return True if none of the module's parameters and buffers is a fake tensor, so that this rank runs it."""
    return not any(is_placeholder(value) for _, value in _first_names(module))


def _first_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
