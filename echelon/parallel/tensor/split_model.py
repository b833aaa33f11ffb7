"""Split the marked modules of a model over the ranks of a split axis."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Layout
from echelon.nn.moe import MoE
from echelon.parallel.expert.split_moe import moe_pieces
from echelon.parallel.expert.split_stacked_experts import has_stacked_experts, stacked_expert_pieces
from echelon.parallel.lora.layer import LoraForward
from echelon.parallel.tensor.conv import conv_pieces
from echelon.parallel.tensor.embedding import embedding_pieces
from echelon.parallel.tensor.head_attention import attention_pieces
from echelon.parallel.tensor.lazy_activation import LazyActivation, whole
from echelon.parallel.tensor.linear import linear_pieces
from echelon.parallel.tensor.lora import lora_pieces
from echelon.parallel.tensor.sequence import sequence_pieces
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, refuse_sequence_of_spread
from echelon.parallel.tensor.transformer_layer import (
    SplitTransformerLayer,
    layer_pieces,
    sequential_pieces,
    stack_pieces,
)
from echelon.parallel.tensor.transposed_linear import is_transposed_linear, transposed_linear_pieces
from echelon.plan.batch_norms import BatchNorm
from echelon.strategy.annotations.marks import Split


class AppliedSplit(NamedTuple):
    """The result of ``apply_split``.

    layouts:  layouts of the split parameters, by full name (a tied parameter has its first name)
    partial:  names of whole parameters whose gradients are partial sums over the split axis
    """

    layouts: dict[str, Layout]
    partial: set[str]


def apply_split(model: nn.Module, marks: Mapping[str, Split], axis: SplitAxis) -> AppliedSplit:
    """Split the marked modules of ``model`` in place. All ranks of the axis must hold the same whole weights before.

    Parameters stay the same objects, with this rank's part as their data.
    """
    pieces = _all_pieces(model, marks, axis)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layouts = _layouts(model, pieces, names)
    by_name = dict(model.named_parameters())
    for name, layout in layouts.items():
        parameter = by_name[name]
        parameter.data = layout.take(parameter.data)
        parameter.grad = None
    for piece in pieces:
        piece.change_class()
    gather_for_functions()
    for module in model.modules():
        _prepare_bystander(module)
    partial_names = {names[id(piece.module.get_parameter(each))] for piece in pieces for each in piece.partial}
    return AppliedSplit(layouts, partial_names)


def why_not(module: nn.Module, mark: Split | None = None) -> str | None:
    """Return the reason why ``module`` cannot be split by ``mark``, default ``Split()``; ``None`` if it can."""
    try:
        _pieces(module, mark or Split(), SplitAxis(None, 0, 1))
    except UnsplittableError as refusal:
        return f"{type(module).__name__} {refusal}"
    return None


# ---- split of one module ----


def _pieces(module: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    if "axis" in type(module).__dict__:
        raise UnsplittableError("is split already; build the model anew")
    refuse_sequence_of_spread(mark, axis)
    if mark.how == "sequence":
        return sequence_pieces(module, mark, axis)
    planner = _planner_of(module)
    if planner is not None:
        made: list[SplitSpec] = planner(module, mark, axis)
        return made
    inside = _splittable(module)
    known = [kind.__name__ for kind in _PLANNERS if kind is not LoraForward]
    hint = f"; mark modules inside it: {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}" if inside else ""
    raise UnsplittableError(f"cannot be split; {', '.join(known)} can{hint}")


def _planner_of(module: nn.Module) -> Any:
    """Return the function that plans the split of this kind of module; None if there is none."""
    for kind, planner in _PLANNERS.items():
        if isinstance(module, kind):
            return planner
    return next((planner for is_kind, planner in _BY_SHAPE.items() if is_kind(module)), None)


_PLANNERS: dict[type[nn.Module], Any] = {
    LoraForward: lora_pieces,
    nn.Linear: linear_pieces,
    nn.Embedding: embedding_pieces,
    nn.Conv2d: conv_pieces,
    nn.MultiheadAttention: attention_pieces,
    nn.TransformerEncoderLayer: partial(layer_pieces, _pieces),
    nn.TransformerDecoderLayer: partial(layer_pieces, _pieces),
    nn.TransformerEncoder: partial(stack_pieces, _pieces),
    nn.TransformerDecoder: partial(stack_pieces, _pieces),
    nn.Sequential: partial(sequential_pieces, _pieces),
    MoE: moe_pieces,
}
#: Modules of other libraries, which are known by their parameters.
_BY_SHAPE: dict[Any, Any] = {
    is_transposed_linear: transposed_linear_pieces,
    has_stacked_experts: stacked_expert_pieces,
}


def _splittable(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the outermost modules inside ``module`` that can be split."""
    result = []
    for name, child in module.named_children():
        result += [f"'{prefix}{name}'"] if why_not(child) is None else _splittable(child, f"{prefix}{name}.")
    return result


# ---- split of a whole model ----


def _all_pieces(model: nn.Module, marks: Mapping[str, Split], axis: SplitAxis) -> list[SplitSpec]:
    modules = dict(model.named_modules(remove_duplicate=False))
    pieces: dict[int, SplitSpec] = {}  # by id of the module, because a shared module has several names
    for name, mark in marks.items():
        if name not in modules:
            raise UsageError(f"split: the model has no module '{name}'")
        try:
            for piece in _pieces(modules[name], mark, axis):
                pieces.setdefault(id(piece.module), piece)
        except UnsplittableError as refusal:
            raise UsageError(f"split: '{name}' ({type(modules[name]).__name__}) {refusal}") from None
    for layer in _with_shortcut(model, set(pieces)):
        pieces[id(layer)] = SplitSpec(layer, SplitTransformerLayer, {"axis": axis, "mark": Split()})
    return list(pieces.values())


def _with_shortcut(model: nn.Module, split: set[int]) -> list[nn.Module]:
    """Return the transformer layers of which only parts are split.

    torch's fast path for inference reads the weights of these layers directly, so it must be disabled.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return [each for each in layers if id(each) not in split and any(id(part) in split for part in each.modules())]


def _prepare_bystander(module: nn.Module) -> None:
    """Adapt a module that is not split itself, but receives sharded activations or contains split layers."""
    if isinstance(module, BatchNorm):  # it may use its own autograd function, which takes only tensors
        module.register_forward_pre_hook(_gather_inputs)
    if isinstance(module, nn.TransformerEncoder) and any(
        isinstance(layer, SplitTransformerLayer) for layer in module.layers
    ):
        module.use_nested_tensor = False  # split layers do not support nested tensors


def _layouts(model: nn.Module, pieces: list[SplitSpec], names: Mapping[int, str]) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    owners: dict[int, set[int]] = {}  # for each split parameter, the modules that are split with it
    for piece in pieces:
        for inner, layout in piece.layouts().items():
            name = names[id(piece.module.get_parameter(inner))]
            if layouts.setdefault(name, layout) != layout:
                raise UsageError(
                    f"split: '{name}' is shared by modules that would cut it differently; give them the same split"
                )
            owner = piece.module.get_submodule(inner.rpartition(".")[0])
            owners.setdefault(id(piece.module.get_parameter(inner)), set()).add(id(owner))
    _refuse_half_split(model, owners, names)
    return layouts


def _refuse_half_split(model: nn.Module, owners: Mapping[int, set[int]], names: Mapping[int, str]) -> None:
    """Raise UsageError if a tied weight is split in some of its modules, but not in all."""
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(module) not in owners.get(id(parameter), {id(module)}):
                raise UsageError(
                    f"split: '{names[id(parameter)]}' is also a weight of '{name}', which is not split; mark both"
                )


def _gather_inputs(module: nn.Module, inputs: Any) -> Any:
    return whole(inputs)


_plain = Function.__dict__["apply"].__func__


@functools.wraps(_plain)
def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__module__.startswith("echelon."):  # these accept a ShardedActivation, as the loss of split logits does
        return _plain(cls, *args, **kwargs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, LazyActivation | list | tuple | dict):
            args, kwargs = whole((args, kwargs))
            break
    return _plain(cls, *args, **kwargs)


def gather_for_functions() -> None:
    """Patch ``torch.autograd.Function.apply`` in this process, so that it receives whole tensors.

    Torch does not check its arguments for ``__torch_function__``: a ShardedActivation would reach the function's
    forward as a plain object, and its gradient would be lost, or ``save_for_backward`` would reject it.
    """
    if Function.__dict__["apply"].__func__ is _plain:
        Function.apply = classmethod(_apply)  # type: ignore[assignment]
