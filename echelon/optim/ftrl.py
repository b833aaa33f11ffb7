"""The FTRL-proximal optimizer: online learning with sparse weights (McMahan et al. 2013, "Ad click prediction")."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.base.errors import UsageError
from echelon.optim.foreach import (
    NOT_NEGATIVE,
    POSITIVE,
    Bound,
    Bundle,
    ForeachOptimizer,
    as_fp32,
    write_back,
    zeros_for,
)

NOT_POSITIVE = Bound(lambda value: value <= 0, "a number of 0 or less")


class FTRL(ForeachOptimizer):
    """FTRL-proximal with the update rule

    n_new = n + g^2;  sigma = (n_new^-lr_power - n^-lr_power) / lr;  z += g - sigma * w

    w = 0 where |z| <= l1, else -(z - sign(z) * l1) / (n_new^-lr_power / lr + 2 * l2)

    params:              parameters, or groups of parameters
    lr:                  learning rate
    lr_power:            exponent of the sum of squared gradients n, default -0.5
    initial_accumulator: initial n, default 0.1; z starts at 0
    l1, l2:              regularization, default 0

    The weights are computed from n and z alone: initial weights enter only through sigma, and a weight whose gradient
    is 0 in the first step becomes 0.

    >>> optimizer = echelon.optim.FTRL(model.parameters(), lr=0.1, l1=1e-4)
    """

    bounds: ClassVar[dict[str, Bound]] = {
        "lr": POSITIVE, "lr_power": NOT_POSITIVE, "initial_accumulator": POSITIVE,
        "l1": NOT_NEGATIVE, "l2": NOT_NEGATIVE,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        lr_power: float = -0.5,
        initial_accumulator: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "lr_power": lr_power, "initial_accumulator": initial_accumulator, "l1": l1, "l2": l2}
        super().__init__(params, defaults)

    def _begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"n": zeros_for(param).fill_(group["initial_accumulator"]), "z": zeros_for(param)}

    def _update(self, bundle: Bundle) -> None:
        group, squares, linear = bundle.group, bundle.state("n"), bundle.state("z")
        rate = float(group["lr"])
        if rate <= 0:
            raise UsageError(f"FTRL divides by its learning rate, which is {rate} now; let the schedule end above 0")
        weights, grads = as_fp32(bundle.params), as_fp32(bundle.grads)
        before = _power(squares, -group["lr_power"])
        torch._foreach_addcmul_(squares, grads, grads)
        scale = _power(squares, -group["lr_power"])
        sigma = torch._foreach_sub(scale, before)
        torch._foreach_div_(sigma, rate)
        torch._foreach_add_(linear, grads)
        torch._foreach_addcmul_(linear, sigma, weights, -1.0)
        torch._foreach_div_(scale, rate)
        torch._foreach_add_(scale, 2 * group["l2"])
        torch._foreach_copy_(weights, torch._foreach_div(_beyond(linear, group["l1"]), scale))
        write_back(bundle.params, weights)


def _power(tensors: list[Tensor], exponent: float) -> list[Tensor]:
    return list(torch._foreach_sqrt(tensors) if exponent == 0.5 else torch._foreach_pow(tensors, exponent))


def _beyond(linear: list[Tensor], l1: float) -> list[Tensor]:
    """Return clamp(z, -l1, l1) - z, which is -(z - sign(z) * l1), and exactly 0 where |z| <= l1."""
    clamped = list(torch._foreach_clamp_min(linear, -l1))
    torch._foreach_clamp_max_(clamped, l1)
    torch._foreach_sub_(clamped, linear)
    return clamped
