"""The LAMB optimizer: Adam with a learning rate for each parameter (You et al. 2019, arXiv:1904.00962)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.base.errors import UsageError
from echelon.optim.foreach import FRACTION, NOT_NEGATIVE, Bound, Bundle, as_fp32, write_back, zeros_for
from echelon.optim.layerwise import LayerwiseOptimizer, add_scaled

if TYPE_CHECKING:
    from echelon.optim.fused import FusedKernels


class LAMB(LayerwiseOptimizer):
    """LAMB with the update rule, on Adam's bias-corrected moments,

    r = m_hat / (sqrt(v_hat) + eps) + weight_decay * w

    w -= lr * (|w| / |r|, or 1 where either is 0) * r

    params:       parameters, or groups of parameters
    lr:           learning rate
    betas:        decay of the moments, default (0.9, 0.999)
    eps:          term of the denominator, default 1e-6
    weight_decay: default 0.01
    exclude:      parameters without weight decay and trust ratio
    fused:        True requires the fused kernel, False disables it, None uses it where it can run (CUDA, fp32)

    >>> optimizer = echelon.optim.LAMB(model.parameters(), lr=1e-3)
    """

    bounds: ClassVar[dict[str, Bound]] = {
        "lr": NOT_NEGATIVE,
        "betas": FRACTION,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        exclude: Iterable[Tensor] = (),
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, exclude, fused)

    def _check(self, settings: dict[str, Any]) -> None:
        betas = settings.get("betas", (0.0, 0.0))
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise UsageError(f"LAMB(betas={betas!r}): expected two numbers")
        super()._check(settings)

    def _begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": zeros_for(param), "exp_avg_sq": zeros_for(param)}

    def _update(self, bundle: Bundle) -> None:
        for state in bundle.states:
            state["step"] += 1
        super()._update(bundle)

    def _foreach_update(self, bundle: Bundle, adaptive: bool) -> None:
        group, weights = bundle.group, as_fp32(bundle.params)
        update = self._updates(bundle, weights, as_fp32(bundle.grads), group["weight_decay"] if adaptive else 0.0)
        if adaptive:
            weight, length = self._norms(bundle.params, weights, update)
            ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
            add_scaled(weights, update, -ratio * group["lr"])
        else:
            torch._foreach_add_(weights, update, alpha=-float(group["lr"]))
        write_back(bundle.params, weights)

    def _updates(self, bundle: Bundle, weights: list[Tensor], grads: list[Tensor], decay: float) -> list[Tensor]:
        """Update the moments and return m_hat / (sqrt(v_hat) + eps) + decay * w."""
        mean, square = bundle.state("exp_avg"), bundle.state("exp_avg_sq")
        beta1, beta2 = bundle.group["betas"]
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        correction1, correction2 = self.corrections(bundle)
        root = math.sqrt(correction2)  # factored out of the fraction: fewer passes over memory
        scale = list(torch._foreach_sqrt(square))
        torch._foreach_add_(scale, bundle.group["eps"] * root)
        updates = list(torch._foreach_mul(weights, decay))
        torch._foreach_addcdiv_(updates, mean, scale, root / correction1)
        return updates

    def _launch(self, fast: FusedKernels, bundle: Bundle, adaptive: list[bool]) -> str | None:
        return fast.lamb(bundle, adaptive, self.corrections(bundle))

    @staticmethod
    def corrections(bundle: Bundle) -> tuple[float, float]:
        """Return Adam's bias corrections 1 - beta^t of both moments."""
        beta1, beta2 = bundle.group["betas"]
        step = bundle.states[0]["step"]
        return 1 - beta1**step, 1 - beta2**step
