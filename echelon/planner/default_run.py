"""The precision and compilation that a run without a strategy has, so that plans are made for what will run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from echelon.fastpath.inspect import Loss, Optimizers, choose_for_one_device
from echelon.fastpath.policy import DeviceCapabilities
from echelon.plan.batch_norms import batch_norm_names
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.system import System
from echelon.strategy import Strategy
from echelon.strategy.fastpath_choice import WHOLE

Precision = Literal["bf16", "fp16"]

#: Kinds of GPUs for which Triton, which torch.compile needs, makes no kernels: compute capability below 7.0.
WITHOUT_TRITON = ("P100",)


@dataclass(frozen=True)
class DefaultRun:
    """Precision and compilation of a run without a strategy on the devices of a cluster.

    amp:      16-bit dtype of forward and loss; None: fp32
    compiled: what is compiled on one device: "blocks" or "whole"; None: nothing
    graphs:   True if a step of one device becomes a CUDA graph where the host is slower than the device
    norms:    True if the model has batch norms; with replicas they communicate in forward, so nothing is compiled
    """

    amp: Precision | None = None
    compiled: Literal["blocks", "whole"] | None = None
    norms: bool = False
    graphs: bool = False

    def runtime(self, system: System) -> System:
        """Return the runtime as such a run uses it."""
        return replace(system, captures=self.graphs)

    def compiles(self, *, replicate: int, stage: int, split: int, shard: int) -> bool:
        """Return True if a run with such a plan compiles, by the rules of ``fastpath.inspect``."""
        if self.compiled is None or stage > 1 or split > 1 or shard == 3:
            return False
        return not (self.norms and replicate > 1)

    def of_draft(self, draft: Draft) -> DefaultRun:
        """Return the precision and compilation of a draft."""
        return replace(self, amp=draft.amp, compiled=(self.compiled or "blocks") if draft.compile else None)

    def __str__(self) -> str:
        """Return text such as ``bf16, compiled blocks``."""
        compiled = {"blocks": "compiled blocks", "whole": "compiled as a whole", None: "not compiled"}[self.compiled]
        return f"{self.amp or 'fp32'}, {compiled}"


FP32_EAGER = DefaultRun()


def find_default_run(
    model: nn.Module,
    loss: Loss | None,
    optimizers: Optimizers,
    machine: DeviceCapabilities,
    strategy: Strategy | None = None,
) -> DefaultRun:
    """Return what a run does for this model on such devices.

    strategy: its ``amp=False`` and ``fast`` are respected; default: no strategy
    """
    given = strategy or Strategy()
    chosen = choose_for_one_device(Strategy(amp=given.amp, fast=given.fast), machine, model, optimizers, loss)
    compiled: Literal["blocks", "whole"] | None = None
    if chosen.compiled:
        compiled = "whole" if chosen.compiled == (WHOLE,) else "blocks"
    return DefaultRun("bf16" if chosen.bf16 else None, compiled, bool(batch_norm_names(model)), chosen.graphs)


def capabilities_of(cluster: Cluster) -> DeviceCapabilities:
    """Return what the fast path may rely on, on every device of a cluster."""
    kinds = [device for device in cluster.kinds if not device.name.startswith("CPU")]
    if len(kinds) < len(cluster.kinds):
        return DeviceCapabilities()
    return DeviceCapabilities(
        cuda=True,
        bf16=all("bfloat16" in device.peak for device in kinds),
        triton=not any(device.name.startswith(WITHOUT_TRITON) for device in kinds),
    )
