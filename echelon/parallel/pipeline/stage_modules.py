"""Which parts of the model a rank of a pipeline keeps: those its stages need. The rest become placeholders.

A placeholder has shape and type but no memory. The model keeps its structure and names, so the user's forward runs on
every rank; what it computes from placeholders are placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from echelon.plan.fake_forward import is_placeholder, placeholder
from echelon.plan.stage_trace import StageTrace


def keep_only(model: nn.Module, recording: StageTrace, stages: Sequence[int]) -> None:
    """Replace parameters and buffers that none of ``stages`` needs, and free their memory. Tied names stay tied.

    Goes before modules are split, synchronized or recomputed, and those only where something was kept: a foreign module
    still tells its output's shape, which must take no message to other ranks.
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
                setattr(module, name, made[id(parameter)])  # not past the module: recurrent ones keep a list of theirs
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) not in kept and not is_placeholder(buffer):
                module._buffers[name] = made.setdefault(id(buffer), placeholder(buffer))
    for parameter in let_go.values():  # an optimizer may still have it
        parameter.data, parameter.grad = parameter.data.new_empty(0), None


def holds(module: nn.Module) -> bool:
    """Whether the module is run for real on this rank, as far as its own tensors tell."""
    return not any(is_placeholder(value) for _, value in _first_names(module))


def _first_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
