"""Inspects model, optimizers, devices and plan for the inputs of ``policy.decide``, and chooses a plan's fast path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.environment import FAST
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.fastpath.compile import is_compiled
from echelon.fastpath.fused_optimizers import leaves_fused_unset
from echelon.fastpath.padded_vocab import odd_layers
from echelon.fastpath.policy import OFF, DeviceCapabilities, FastPathTraits, decide
from echelon.nn import SparseEmbedding
from echelon.nn.moe import MoE
from echelon.parallel.autocast_unsafe import find_autocast_unsafe
from echelon.plan import Plan, make_plan
from echelon.plan.build import sparse_names
from echelon.plan.draft import Draft
from echelon.plan.segments import repeated_blocks
from echelon.strategy import Amp, Fast, Strategy
from echelon.strategy.fastpath_choice import FastPathChoice

Optimizers = Mapping[str, torch.optim.Optimizer]
Loss = Callable[..., Any]


def requested_fast_path(strategy: Strategy) -> Fast:
    """Return the parts that a strategy requests; ECHELON_FAST=0 switches all off if the strategy does not set them."""
    unwanted = strategy.fast is None and os.environ.get(FAST) == "0"
    return OFF if unwanted or strategy.fast is False else strategy.part(Fast) or Fast()


def choose_fast_path(
    plan: Plan,
    strategy: Strategy,
    world: World,
    model: nn.Module,
    optimizers: Optimizers,
    served: bool = False,
    loss: Loss | None = None,
) -> Plan:
    """Return the plan with its fast path. All ranks call this together; only features of all devices are used."""
    requested = requested_fast_path(strategy)
    amp = strategy.amp if strategy.amp is not None else plan.amp  # some strategies set it in the plan
    chosen = decide(requested, amp, traits_of(plan, machine_of(world), model, optimizers, served, loss))
    return with_fast_path(plan, chosen)


def choose_for_saved_plan(
    plan: Plan,
    draft: Draft,
    strategy: Strategy,
    world: World,
    model: nn.Module,
    optimizers: Optimizers,
    loss: Loss | None = None,
) -> Plan:
    """Return the plan with the fast path of a run without a strategy, in the draft's precision.

    It compiles if the draft does; on a GPU, a part that is impossible there is left out with a line.
    """
    requested, machine = requested_fast_path(strategy), machine_of(world)
    compile = requested.compile if machine.cuda or requested.compile is False else True
    requested = dataclasses.replace(requested, bf16=False, compile=draft.compile and compile)
    chosen = decide(requested, draft.amp or False, traits_of(plan, machine, model, optimizers, False, loss))
    return with_fast_path(plan, chosen)


def choose_for_one_device(
    strategy: Strategy, machine: DeviceCapabilities, model: nn.Module, optimizers: Optimizers, loss: Loss | None = None
) -> FastPathChoice:
    """Return the fast path of a run of one process on such a device."""
    plan = make_plan(model, optimizers, Strategy(), 1)
    traits = traits_of(plan, machine, model, optimizers, False, loss)
    return decide(requested_fast_path(strategy), strategy.amp, traits)


def with_fast_path(plan: Plan, chosen: FastPathChoice) -> Plan:
    return dataclasses.replace(plan, fast=chosen, amp=Amp() if chosen.bf16 else plan.amp)


def machine_of(world: World) -> DeviceCapabilities:
    local = _machine(world.device)
    if world.control is None:
        return local
    everyone = gather_json(dataclasses.asdict(local), world.control)
    return DeviceCapabilities(**{name: all(one[name] for one in everyone) for name in dataclasses.asdict(local)})


def _machine(device: torch.device) -> DeviceCapabilities:
    if device.type != "cuda":
        return DeviceCapabilities()
    from torch.utils._triton import has_triton

    return DeviceCapabilities(
        cuda=True, bf16=torch.cuda.is_bf16_supported(including_emulation=False), triton=has_triton()
    )


def traits_of(
    plan: Plan,
    machine: DeviceCapabilities,
    model: nn.Module,
    optimizers: Optimizers,
    served: bool,
    loss: Loss | None = None,
) -> FastPathTraits:
    weights = [p for p in model.parameters() if p.is_floating_point()]
    blocks = _alike(model, repeated_blocks(model))
    return FastPathTraits(
        machine=machine,
        blocks=blocks,
        compiled=any(is_compiled(module) for module in model.modules()),
        cut=_cut(plan, model, served),
        only_blocks=_only_blocks(plan),
        slow_inside=_slow_inside(plan),
        convolutions=_has_convolutions(model),
        views=_views(model),
        odd=odd_layers(model, blocks) if _is_in_one_piece(plan) else (),
        unsafe=find_autocast_unsafe(model, loss),
        fp32=_trains_fp32(weights),
        unset={key: type(o).__name__ for key, o in optimizers.items() if leaves_fused_unset(o)},
        unfused=_unfused(plan, model, served),
        uncaptured=_uncaptured(plan, model, served, len(optimizers)),
    )


def _trains_fp32(weights: list[nn.Parameter]) -> bool:
    """Return True if all weights are fp32; frozen ones, as those beneath adapters, may be bf16 already."""
    trained = [p for p in weights if p.requires_grad]
    frozen = {p.dtype for p in weights if not p.requires_grad} if trained else set()
    return bool(weights) and {p.dtype for p in trained or weights} == {torch.float32} and frozen <= _COMPUTED


_COMPUTED = {torch.float32, torch.bfloat16}


def _alike(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """Return the blocks if one compiled program serves all of them (same class and shapes), else none."""
    modules = [model.get_submodule(name) for name in names]
    kinds = {(type(m), tuple((name, tuple(p.shape)) for name, p in m.named_parameters())) for m in modules}
    return tuple(names) if len(kinds) == 1 else ()


def _cut(plan: Plan, model: nn.Module, served: bool) -> str | None:
    if plan.mesh.get("split", 1) > 1:
        return "split layers communicate with other ranks inside forward"
    if served or any(isinstance(module, SparseEmbedding) for module in model.modules()):
        return "forward pulls rows of sparse tables from servers"
    if any(isinstance(module, MoE) for module in model.modules()):
        return "the number of tokens of an expert changes from step to step"
    return None


def _is_in_one_piece(plan: Plan) -> bool:
    return plan.mesh.get("split", 1) == 1 and _only_blocks(plan) is None


def _only_blocks(plan: Plan) -> str | None:
    """Return why only blocks can be compiled, or None.

    Both cases send between blocks, outside of compiled code, with the numbers of uncompiled runs. It takes a request,
    because neither speed nor memory has been measured on several GPUs.
    """
    if plan.mesh.get("stage", 1) > 1:
        return "stages send the outputs of units"
    if plan.shard is not None and plan.shard.level == 3:
        return "shard 3 gathers weights layer by layer"
    return None


def _slow_inside(plan: Plan) -> str | None:
    if plan.sync_batch_norm:
        return (
            f"{len(plan.sync_batch_norm)} batch norms communicate with other ranks inside forward; "
            "with sync_batch_norm=False the model is compiled"
        )
    return "activations are offloaded to host memory" if plan.offload else None


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def _views(model: nn.Module) -> str | None:
    """Return why channels last may fail: a module with convolutions whose own forward uses view(); None otherwise."""
    for module in model.modules():
        forward = getattr(type(module), "forward", None)  # a scripted module's class has none
        of_torch = str(getattr(forward, "__module__", "")).partition(".")[0] == "torch"
        if not of_torch and "view" in _names(forward) and _has_convolutions(module):
            return (
                f"forward() of {type(module).__name__} uses view(), which needs contiguous tensors (reshape() does not)"
            )
    return None


def _names(function: object) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _unfused(plan: Plan, model: nn.Module, served: bool) -> str | None:
    if served:
        return "parameter servers run the optimizer"
    if plan.shard is not None and plan.shard.offload:
        return "the optimizer steps in host memory"
    if plan.dgc is not None:
        return "compressed gradients have their own optimizer step"
    if plan.low_memory is not None:
        return "low_memory has its own optimizer step"
    return "some gradients are sparse" if sparse_names(model) else None


def _uncaptured(plan: Plan, model: nn.Module, served: bool, optimizers: int) -> str | None:
    if served:
        return "rows of sparse tables come from servers in every step"
    if plan.ranks > 1:
        return f"{plan.ranks} ranks communicate in every step"
    if plan.pipeline is not None or plan.shard is not None or plan.offload:
        return "a step is more than one forward and backward pass"
    if plan.low_memory is not None:
        return "low_memory runs the optimizer inside backward"
    if optimizers > 1:
        return "several optimizers need a custom loop"
    if any(hasattr(module, "auxiliary_loss") for module in model.modules()):
        return "modules keep auxiliary losses"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "scripted modules hold values that guards cannot read"
    return "some gradients are sparse" if sparse_names(model) else None
