"""Chooses the parts of the fast path, and describes them in log lines.

The choice is a pure function of the requested parts and of the traits of model and devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from echelon.base.config import strict
from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.strategy import Fast
from echelon.strategy.fastpath_choice import WHOLE, FastPathChoice

OFF = Fast(compile=False, channels_last=False, fused=False, graphs=False, bf16=False, pad=False)

#: Names of the parts in log lines.
NAMES = {"compile": "compile", "bf16": "bf16", "channels_last": "channels last", "fused": "fused optimizers",
         "graphs": "CUDA graphs", "pad": "padding"}  # fmt: skip

ALREADY = "the model was compiled before distribute()"


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


def decide(requested: Fast, amp: object, traits: FastPathTraits) -> FastPathChoice:
    """Return the parts of the fast path to use; raise UsageError if a requested part is impossible.

    amp: the Strategy's setting; None leaves it open, False forbids it
    """
    reasons = {
        "compile": _no_compile(traits),
        "bf16": _no_bf16(amp, traits),
        "channels_last": traits.views if traits.convolutions else "the model has no 2-D convolutions",
        "fused": traits.unfused or (None if traits.unset else "no optimizer with a fused step leaves fused= unset"),
        "graphs": _no_graphs(traits),
    }
    on = {part: _is_on(part, getattr(requested, part), reason, traits) for part, reason in reasons.items()}
    compiled = _compiled(requested, traits) if on["compile"] else ()
    no_pad = _no_pad(compiled, on["bf16"] or bool(amp) or not traits.fp32, traits)
    return FastPathChoice(
        compiled=compiled,
        channels_last=on["channels_last"],
        fused=traits.unset if on["fused"] else {},
        graphs=on["graphs"],
        bf16=on["bf16"],
        padded=traits.odd if _is_on("pad", requested.pad, no_pad, traits) else (),
        left_out={
            NAMES[part]: reason
            for part, reason in reasons.items()
            if reason and traits.machine.cuda and getattr(requested, part) is None and _is_news(part, amp, traits)
        },
    )


def _is_on(part: str, wish: object, reason: str | None, traits: FastPathTraits) -> bool:
    if wish is None:  # the default is on only on GPUs, where a gain has been measured
        return traits.machine.cuda and reason is None
    if wish is False:
        return False
    impossible = _impossible(part, reason, traits)
    if impossible is not None:
        raise UsageError(f"Fast({part}={wish!r}): {impossible}; leave {part} out of Fast(...)")
    return True


def _impossible(part: str, reason: str | None, traits: FastPathTraits) -> str | None:
    """Return the reason against a part that a user's request cannot overrule, or None."""
    if part == "compile":
        return traits.cut or (ALREADY if traits.compiled else None)
    if part == "channels_last" and traits.convolutions:
        return None
    if part == "graphs" and not traits.machine.cuda:
        return "only NVIDIA GPUs have CUDA graphs"
    return reason


def _no_compile(traits: FastPathTraits) -> str | None:
    if traits.compiled:
        return ALREADY
    if traits.machine.cuda and not traits.machine.triton:
        return "Triton, which torch.compile makes kernels with, does not work here"
    return traits.cut or traits.only_blocks or traits.slow_inside


def _no_bf16(amp: object, traits: FastPathTraits) -> str | None:
    if amp is not None:
        return "Strategy(amp=...) already sets the dtype"
    if not traits.fp32:
        return "the weights are not all fp32"
    if traits.unsafe:
        return traits.unsafe
    return None if traits.machine.bf16 else "not every device computes in bf16"


def _no_graphs(traits: FastPathTraits) -> str | None:
    return traits.uncaptured


def _no_pad(compiled: tuple[str, ...], sixteen: bool, traits: FastPathTraits) -> str | None:
    if not traits.odd:
        return "no large output layer needs padding"
    if traits.compiled or compiled == (WHOLE,):
        return "the compiler already pads"
    return None if sixteen else "padding speeds up 16-bit compute only"


def _compiled(requested: Fast, traits: FastPathTraits) -> tuple[str, ...]:
    """Return the names of the modules to compile: the repeated blocks, or the whole model.

    Equal blocks are compiled once for all of them, in seconds. For different blocks the compiler would make one program
    with dynamic shapes, so compiling the whole model is faster.
    """
    if requested.compile == "blocks" and not traits.blocks:
        raise UsageError("Fast(compile='blocks'): the model has no repeated blocks; use compile='whole'")
    whole = requested.compile == "whole" or not traits.blocks
    if whole and traits.only_blocks:
        raise UsageError(
            f"Fast(compile={requested.compile!r}): {traits.only_blocks}, so that only repeated blocks can be "
            f"compiled{'; use compile=True' if traits.blocks else ', and there are none; leave compile out'}"
        )
    return (WHOLE,) if whole else traits.blocks


def _is_news(part: str, amp: object, traits: FastPathTraits) -> bool:
    """Return True if it is worth reporting that a part is off.

    It is not for channels last without convolutions, for bf16 if the user has set amp, and for CUDA graphs, which are
    for small steps of one rank.
    """
    return not (
        part == "graphs"
        or (part == "channels_last" and not traits.convolutions)
        or (part == "bf16" and amp is not None)
        or (part == "fused" and traits.unfused is None)
    )


def startup_lines(chosen: FastPathChoice) -> Iterator[str]:
    """Yield a line with the parts that are on, and one line for each part that is left out."""
    if chosen.any:
        yield f"fast: {'; '.join(_parts(chosen))}; Strategy(fast=False) switches it off"
    for part, reason in chosen.left_out.items():
        yield f"fast: {part} disabled: {reason}"


def _parts(chosen: FastPathChoice) -> Iterator[str]:
    if chosen.compiled:
        yield f"compiled {_what(chosen.compiled)}"
    if chosen.bf16:
        yield "bf16 (Strategy(amp=False) keeps fp32)"
    if chosen.channels_last:
        yield "channels last"
    if chosen.padded:
        yield f"padded {', '.join(chosen.padded)}"
    if chosen.fused:
        yield f"fused {', '.join(dict.fromkeys(chosen.fused.values()))}"
    if chosen.graphs:
        yield "CUDA graphs where the host limits the step"


def _what(names: tuple[str, ...]) -> str:
    if names == (WHOLE,):
        return "the whole model"
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return f"{things(len(names), 'block')} of {', '.join(f'{parent}.*' if parent else '*' for parent in parents)}"
