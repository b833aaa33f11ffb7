"""Build LARS from the user's SGD, and LAMB from the user's Adam, with shared parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from echelon.base.errors import UsageError
from echelon.optim.lamb import LAMB
from echelon.optim.lars import LARS
from echelon.optim.layerwise import LayerwiseOptimizer
from echelon.optim.shared_groups import share_groups

Ours = TypeVar("Ours", bound=LayerwiseOptimizer)
# Options that change the update rule and that LARS and LAMB lack.
UNSUPPORTED = ("nesterov", "dampening", "maximize", "amsgrad", "differentiable", "capturable")


def lars_from(
    optimizer: Optimizer, *, coeff: float, weight_decay: float, eps: float, exclude: Iterable[Tensor] = ()
) -> LARS:
    """Return a LARS with the learning rates and momentum of an SGD; ``weight_decay`` replaces that of the SGD.

    Parameters in ``exclude`` that belong to another optimizer are ignored.
    """
    require_plain("LARS", optimizer, (SGD,))
    values = {"coeff": coeff, "weight_decay": weight_decay, "eps": eps}
    first = optimizer.param_groups[0]
    made = LARS(_copies(optimizer, values), first["lr"], first["momentum"], exclude=_owned(optimizer, exclude))
    return _share(made, optimizer, values)


def lamb_from(optimizer: Optimizer, *, weight_decay: float, eps: float, exclude: Iterable[Tensor] = ()) -> LAMB:
    """Return a LAMB with the learning rates and betas of an Adam; ``weight_decay`` and ``eps`` replace the Adam's.

    The given optimizer is an Adam or AdamW. Parameters in ``exclude`` that belong to another optimizer are ignored.
    """
    require_plain("LAMB", optimizer, (Adam, AdamW))
    values = {"weight_decay": weight_decay, "eps": eps}
    first = optimizer.param_groups[0]
    made = LAMB(_copies(optimizer, values), first["lr"], first["betas"], exclude=_owned(optimizer, exclude))
    return _share(made, optimizer, values)


def require_plain(wanted: str, optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> None:
    """Raise UsageError if the optimizer uses a feature that its replacement lacks, or has already taken steps."""
    # Subclasses are refused: a subclass may define its own step, which would never be called.
    if type(optimizer) not in kinds:
        names = " or ".join(f"torch.optim.{kind.__name__}" for kind in kinds)
        raise UsageError(f"{wanted} is built on {names}, and the optimizer is a {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        for option in UNSUPPORTED:
            if group.get(option):
                raise UsageError(
                    f"{wanted} has no {option}, and the {type(optimizer).__name__} was built with "
                    f"{option}={group[option]!r}; leave it out"
                )
    if optimizer.state:
        raise UsageError(
            f"{wanted} keeps state of its own, and the {type(optimizer).__name__} has already taken steps; "
            "give a fresh one"
        )


def _copies(optimizer: Optimizer, values: dict[str, float]) -> list[dict[str, Any]]:
    """Return copies of the groups with ``values``, so that they are checked before the given optimizer is changed."""
    return [{**group, **values} for group in optimizer.param_groups]


def _owned(optimizer: Optimizer, exclude: Iterable[Tensor]) -> list[Tensor]:
    owned = {param for group in optimizer.param_groups for param in group["params"]}
    return [tensor for tensor in exclude if tensor in owned]


def _share(made: Ours, source: Optimizer, values: dict[str, float]) -> Ours:
    for group in source.param_groups:
        group.update(values)
    source.defaults.update(values)  # for groups that are added to the source later
    share_groups(made, source)
    return made
