"""Inputs of the choice of a fast path, as plain values."""

from __future__ import annotations

import dataclasses

from echelon.base.config import strict


@strict
class DeviceCapabilities:
    """Capabilities of a rank's device, or those common to the devices of all ranks.

    triton: True if Triton, which torch.compile needs, works
    """

    cuda: bool = False
    bf16: bool = False
    triton: bool = False


@strict
class FastPathTraits:
    """Traits of the devices, the model, its optimizers and the plan. A reason is a text, or None if there is none.

    blocks:       names of the repeated blocks, if all of them are equal
    compiled:     True if user code has compiled the model or a part of it
    cut:          reason why the model cannot be compiled under this plan
    only_blocks:  reason why only repeated blocks can be compiled, on request, and not the whole model
    slow_inside:  reason why compiling would not pay off
    convolutions: True if the model has 2-D convolutions
    views:        reason why the model may fail with channels last
    odd:          names of large output layers of unaligned size, outside of blocks
    unsafe:       reason why model and loss cannot run in 16 bits
    fp32:         True if all weights are fp32
    unset:        class name of each optimizer that has a fused step and leaves it unset, by optimizer name
    unfused:      reason why no optimizer may use a fused step
    uncaptured:   reason why a step is more than one forward and backward pass on this device
    """

    machine: DeviceCapabilities = DeviceCapabilities()
    blocks: tuple[str, ...] = ()
    compiled: bool = False
    cut: str | None = None
    only_blocks: str | None = None
    slow_inside: str | None = None
    convolutions: bool = False
    views: str | None = None
    odd: tuple[str, ...] = ()
    unsafe: str | None = None
    fp32: bool = True
    unset: dict[str, str] = dataclasses.field(default_factory=dict)
    unfused: str | None = None
    uncaptured: str | None = None
