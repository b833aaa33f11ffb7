"""The LARS optimizer: momentum SGD with a learning rate for each parameter (You et al. 2017, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.foreach import FRACTION, NOT_NEGATIVE, POSITIVE, Bound, Bundle, as_fp32, write_back, zeros_for
from echelon.optim.layerwise import LayerwiseOptimizer, add_scaled

if TYPE_CHECKING:
    from echelon.optim.fused import FusedKernels


class LARS(LayerwiseOptimizer):
    """LARS with the update rule

    local_lr = lr * coeff * |w| / (|g| + weight_decay * |w| + eps), or lr where |w| or |g| is 0

    v = momentum * v + local_lr * (g + weight_decay * w);  w -= v

    params:       parameters, or groups of parameters
    lr:           learning rate
    momentum:     default 0.9
    coeff:        trust coefficient, default 0.001
    weight_decay: default 0.0005
    eps:          term of the denominator, default 0
    exclude:      parameters without weight decay and trust ratio
    fused:        True requires the fused kernel, False disables it, None uses it where it can run (CUDA, fp32)

    >>> optimizer = echelon.optim.LARS(model.parameters(), lr=0.1)
    """

    bounds: ClassVar[dict[str, Bound]] = {
        "lr": NOT_NEGATIVE, "momentum": FRACTION, "coeff": POSITIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        coeff: float = 0.001,
        weight_decay: float = 0.0005,
        eps: float = 0.0,
        *,
        exclude: Iterable[Tensor] = (),
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "coeff": coeff, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults, exclude, fused)

    def _begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": zeros_for(param)}

    def _foreach_update(self, bundle: Bundle, adaptive: bool) -> None:
        group, momenta = bundle.group, bundle.state("momentum_buffer")
        weights, grads = as_fp32(bundle.params), as_fp32(bundle.grads)
        torch._foreach_mul_(momenta, group["momentum"])
        if adaptive:
            update = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
            add_scaled(momenta, list(update), self._rates(bundle, weights, grads))
        else:
            torch._foreach_add_(momenta, grads, alpha=float(group["lr"]))
        torch._foreach_sub_(weights, momenta)
        write_back(bundle.params, weights)

    def _rates(self, bundle: Bundle, weights: list[Tensor], grads: list[Tensor]) -> Tensor:
        group = bundle.group
        weight, grad = self._norms(bundle.params, weights, grads)
        ratio: Tensor = group["coeff"] * weight / (grad + group["weight_decay"] * weight + group["eps"])
        return torch.where((weight > 0) & (grad > 0), ratio, 1.0).mul(group["lr"])

    def _launch(self, fast: FusedKernels, bundle: Bundle, adaptive: list[bool]) -> str | None:
        return fast.lars(bundle, adaptive)
