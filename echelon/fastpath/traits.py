"""What the choice of a fast path goes by, as plain values."""

from __future__ import annotations

import dataclasses

from echelon.base.config import strict


@strict
class DeviceCapabilities:
    """What a rank's device can do; of several ranks, what all of them can. ``triton``: torch.compile has its tools."""

    cuda: bool = False
    bf16: bool = False
    triton: bool = False


@strict
class FastPathTraits:
    """Of the devices, the model, its optimizers and the plan. Reasons are in words, and None where there is none.

    blocks:      the repeated blocks, where all of them are alike
    compiled:    somebody has compiled the model, or a part of it, already
    cut:         why what the plan does to the model cannot be compiled
    only_blocks: why blocks inside it can, on request, and the whole cannot
    slow_inside: why compiling it would not pay
    views:       why images might not go through it with their channels last
    odd:         large output layers of an odd size, outside of blocks
    unsafe:      why model and loss are not for 16 bits
    fp32:        all weights are 32-bit floats
    unset:       by name, the class of each optimizer with a fused step that nobody has decided about
    unfused:     why no optimizer's step may become another
    uncaptured:  why a step is more than one forward and backward pass of this device
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
