"""Find whether an optimizer's update of an entry depends on that entry only, on its parameter or on all parameters.

A rank that holds shards of parameters steps each shard separately, which is correct only if the update is
element-wise. The optimizers of torch are known by class. Any other optimizer is tested: it takes some steps on a small
matrix, whole and in halves; if the results differ, the update is not element-wise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from echelon.optim.optimizer_copy import PLAIN, copy_optimizer

_ENTRIES = (
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "ASGD", "Rprop", "SparseAdam"),
)
SIZE, STEPS = 32, 4  # some optimizers factor only matrices with at least 16 rows and columns; some begin with a warm-up
APART = 1e-3  # tolerance relative to the largest change of the weights; rounding errors are a thousandth of it


class StepReach(IntEnum):
    """The entries on which the update of one entry depends."""

    ENTRY = 0
    PARAMETER = 1
    ALL = 2


def _classes(names: Sequence[str]) -> tuple[type, ...]:
    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


def find_reach(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> StepReach | str:
    """Return the reach of steps with the settings of ``group``, or the reason why it cannot be determined."""
    from echelon.optim.foreach import ForeachOptimizer

    kind = type(optimizer)
    if kind in _classes(_ENTRIES) or isinstance(optimizer, ForeachOptimizer):  # LARS and LAMB all-reduce their norms
        return StepReach.ENTRY
    if isinstance(optimizer, _classes(("Adafactor", "Muon"))):
        return StepReach.PARAMETER
    if isinstance(optimizer, torch.optim.LBFGS):
        return StepReach.ALL
    device = next((p.device for p in group["params"]), torch.device("cpu"))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            return _tried(optimizer, group, device)
    except Exception as error:  # a third-party optimizer may raise anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device) -> StepReach | str:
    g = torch.Generator().manual_seed(0)
    uneven = torch.logspace(-1, 1, SIZE)
    one, other = (
        [torch.randn(SIZE, SIZE, generator=g) * uneven * uneven.flip(0).unsqueeze(1) * 0.1 for _ in range(STEPS + 1)]
        for _ in range(2)
    )

    def step(*parts: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
        torch.manual_seed(seed)
        return _stepped(optimizer, group, [[value.to(device) for value in values] for values in parts])

    alone = step(one)[0]
    if _differ(alone, step(one, seed=1)[0], one[0]):
        return "its steps are random"
    if _differ(alone, step(one, other)[0], one[0]):
        return StepReach.ALL
    for dim in (0, 1):
        halves = [step([value.chunk(2, dim)[i].contiguous() for value in one])[0] for i in (0, 1)]
        if _differ(alone, torch.cat(halves, dim), one[0]):
            return StepReach.PARAMETER
    return StepReach.ENTRY


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parts: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters after ``STEPS`` steps; each of ``parts`` has the weights first, then the gradients."""
    parameters = [nn.Parameter(values[0].clone()) for values in parts]
    plain: dict[str, Any] = {name: way for name, way in PLAIN.items() if name in group}
    if group.get("lr") is not None:
        plain["lr"] = 0.01  # a schedule may begin with 0
    twin = copy_optimizer(optimizer, [{**group, **plain, "params": parameters}])
    for step in range(1, STEPS + 1):
        for parameter, values in zip(parameters, parts, strict=True):
            parameter.grad = values[step].clone()
        twin.step()
    return [parameter.detach().cpu() for parameter in parameters]


def _differ(one: Tensor, other: Tensor, begun: Tensor) -> bool:
    return not float((one - other).abs().max()) <= APART * float((one - begun).abs().max())
