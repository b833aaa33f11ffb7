"""Mixed precision: check the device's support for a 16-bit type, and scale the loss so that fp16 gradients survive."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import LossError, UsageError
from echelon.strategy import Amp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: Number of consecutive overflows at the lowest scale after which the loss itself is considered to have diverged.
HOPELESS = 50


def check_precision(amp: Amp | None, device: torch.device) -> None:
    """Raise UsageError if the device has no native arithmetic for the type of ``amp``."""
    if amp is None:
        return
    if amp.dtype == "fp16" and device.type == "cpu" and not _cpu_computes_fp16():
        raise UsageError("amp='fp16' was requested, but this CPU has no fp16 arithmetic; use amp='bf16'")
    if amp.dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("amp='bf16' was requested, but this GPU has no bf16 arithmetic; use amp='fp16'")


@functools.cache
def _cpu_computes_fp16() -> bool:
    """Return True if the CPU has fp16 instructions.

    Without them an fp16 matrix product takes about 60 times as long as one in bf16.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return not {"avx512_fp16", "amx_fp16", "asimdhp"}.isdisjoint(flags)


class LossScaler:
    """The loss scale: the loss is multiplied by it before backward, and the gradients are divided by it afterwards."""

    def __init__(self, amp: Amp | None) -> None:
        scaling = amp.scaling if amp else None
        self._amp = amp or Amp()
        self._dynamic = scaling == "dynamic"
        self.active = scaling is not None
        self.scale = self._amp.init_scale if self._dynamic else float(scaling or 1.0)
        self.skipped = 0  #: steps that overflowed so far
        self._finite = 0  # consecutive finite steps
        self._overflowed = 0

    def unscale(self, gradients: list[Tensor], boost: float = 1.0) -> bool:
        """Divide the gradients by the scale times ``boost``, in place, and return True if every entry is finite.

        On a GPU this call synchronizes with the device.
        """
        if not gradients:
            return True
        result = torch.zeros((), device=gradients[0].device)
        inverse = torch.full((), 1.0 / (self.scale * boost), device=gradients[0].device)
        by_kind: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            values = gradient._values() if gradient.is_sparse else gradient
            by_kind.setdefault(values.dtype, []).append(values)
        for same in by_kind.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, result, inverse)
        return not float(result)

    def update(self, finite: bool) -> str | None:
        """Update the scale after a step; return a line to log if the scale changed, else None."""
        before = self.scale
        self._finite = self._finite + 1 if finite else 0
        self._overflowed = 0 if finite else self._overflowed + 1
        self.skipped += not finite
        if self._dynamic:
            self._adapt()
        self._refuse_hopeless(before)
        return None if self.scale == before else f"loss scale {before:g} -> {self.scale:g}"

    def lower_to(self, scale: float) -> None:
        """Use this scale, the smallest of all ranks, from now on."""
        self.scale = scale

    def _adapt(self) -> None:
        if self._finite == self._amp.growth_interval:
            self.scale, self._finite = self.scale * self._amp.growth, 0
        if self._overflowed and self._overflowed % self._amp.backoff_after == 0:
            self.scale = max(self.scale * self._amp.backoff, self._amp.min_scale)

    def _refuse_hopeless(self, before: float) -> None:
        lowest = self.scale == before and (before <= self._amp.min_scale or not self._dynamic)
        if lowest and self._overflowed >= HOPELESS:
            raise LossError(
                f"gradients overflowed in {self._overflowed} steps in a row at a loss scale of {self.scale:g}; lower "
                "the learning rate, clip gradients, or give a smaller Amp(loss_scale=...)"
            )

    def facts(self) -> dict[str, float]:
        return {
            "scale": self.scale, "finite": self._finite, "overflowed": self._overflowed, "skipped": self.skipped
        }  # fmt: skip

    def restore(self, facts: Mapping[str, Any]) -> None:
        if self._dynamic:
            self.scale = facts["scale"]
        self._finite, self._overflowed, self.skipped = facts["finite"], facts["overflowed"], facts["skipped"]


def are_finite(gradients: list[Tensor]) -> bool:
    """Return True if every entry is finite. On a GPU this call synchronizes with the device."""
    values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if value.numel():
            by_device.setdefault(value.device, []).append(value)
    largest = [torch.stack([n.double() for n in torch._foreach_norm(same, math.inf)]) for same in by_device.values()]
    return all(bool(torch.isfinite(norms).all()) for norms in largest)
