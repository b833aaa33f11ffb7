"""Activation checkpointing: recomputes activations in backward, with the same numbers as a run that keeps them.

torch.utils.checkpoint restores random numbers and autocast. In addition, buffers are set to their values before the
segment's forward while the segment is recomputed, and keep the values after that forward otherwise: batch norm counts
a batch once, and a module that reads a buffer which it updates computes the same result again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from echelon.base.errors import UsageError
from echelon.base.lazy_dynamo import hide_from_dynamo
from echelon.distributed.collectives import gather_json
from echelon.parallel.activation_offload import HostStore
from echelon.parallel.kv_cache import switch_off
from echelon.plan.batch_norms import BatchNorm
from echelon.plan.called_modules import why_fixed
from echelon.plan.operations import tensors_in
from echelon.plan.saved_bytes import SavedBytes, forget
from echelon.plan.segments import Segments, cut_chain

Spans = tuple[tuple[str, ...], ...]  # keys of a Sequential's children that are recomputed together


def apply_recompute(
    model: nn.Module, segments: Segments, chains: Iterable[str], *, offload: bool, group: dist.ProcessGroup | None
) -> None:
    """Make the segments of ``model`` recompute. Weights, buffers and names do not change.

    Call this after ``synchronize``, whose batch norm replaces forward. ``group`` is a process group for CPU tensors,
    over which all ranks agree where to cut ``chains``.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        _undo(module)
    switch_off(model)  # an engine's model has it done already, but copies made for measurements have their own configs
    store = HostStore() if offload else None
    alone = functools.cache(functools.partial(_alone, store=store))  # blocks of one class share the new class
    for name in _single(segments):
        _change_class(name, modules[name], alone)  # type: ignore[arg-type]
    for name, spans in _spans_by_parent(segments).items():
        _change_class(name, modules[name], functools.partial(_in_spans, spans=spans, store=store))
    for name in chains:
        _change_class(name, modules[name], functools.partial(_to_be_cut, group=group, store=store))


# ---- classes: replacing a module's class keeps the module's identity, and works for its deep copies ----

Kind = type[nn.Module]


def _alone(kind: Kind, store: HostStore | None) -> Kind:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        if not _wanted(self):
            return run(*args, **kwargs)
        return _recompute(run, [self], store, *args, **kwargs)

    return _derived(kind, forward)


def _in_spans(kind: Kind, spans: Spans, store: HostStore | None) -> Kind:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, input: Any) -> Any:
        return _run_spans(self, spans, input, store) if _wanted(self) else kind.forward(self, input)

    return _derived(kind, forward)


def _to_be_cut(kind: Kind, group: dist.ProcessGroup | None, store: HostStore | None) -> Kind:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, input: Any) -> Any:
        if not _wanted(self):
            return kind.forward(self, input)
        if _CUTS not in self.__dict__:
            self.__dict__[_CUTS] = _cut(self, input, group)
        return _run_spans(self, self.__dict__[_CUTS], input, store)

    return _derived(kind, forward)


_PLAIN, _CUTS = "_class_without_recompute", "_recompute_cuts"


def _derived(kind: Kind, forward: Callable[..., Any]) -> Kind:
    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, _PLAIN: kind})


def _change_class(name: str, module: nn.Module, derive: Callable[[Kind], Kind]) -> None:
    reason = why_fixed(name, module)
    if reason is not None:
        raise UsageError(f"recompute: {reason}, or name the modules inside it")
    if _PLAIN not in type(module).__dict__:  # else it was changed already: a shared module has several names
        module.__class__ = derive(type(module))


def _undo(module: nn.Module) -> None:
    """Restore the original class: a model may be distributed again with another strategy."""
    module.__dict__.pop(_CUTS, None)
    if _PLAIN in type(module).__dict__:
        module.__class__ = type(module).__dict__[_PLAIN]


def _wanted(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _single(segments: Segments) -> list[str]:
    return [names[0] for names in segments if len(names) == 1]


def _spans_by_parent(segments: Segments) -> dict[str, Spans]:
    spans: dict[str, Spans] = {}
    for names in segments:
        if len(names) > 1:
            parent = names[0].rpartition(".")[0]
            spans[parent] = (*spans.get(parent, ()), tuple(name.rpartition(".")[2] for name in names))
    return spans


# ---- running a Sequential in segments ----


def _run_spans(sequential: nn.Module, spans: Spans, value: Any, store: HostStore | None) -> Any:
    for keys, kept in _pieces(list(sequential._modules), spans):
        children = [child for key in keys if (child := sequential._modules[key]) is not None]
        run = functools.partial(_run_in_turn, children)
        value = run(value) if kept else _recompute(run, children, store, value)
    return value


def _run_in_turn(children: Iterable[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value


def _pieces(keys: Sequence[str], spans: Spans) -> Iterator[tuple[Sequence[str], bool]]:
    """Yield the children's keys in order: spans, and single children between them, which keep their activations.

    Keys are used because a slice of a Sequential would have the (replaced) class of the whole.
    """
    by_first = {span[0]: span for span in spans}
    at = 0
    while at < len(keys):
        span = by_first.get(keys[at], ())
        whole = bool(span) and tuple(keys[at : at + len(span)]) == span
        yield (span, False) if whole else ([keys[at]], True)
        at += len(span) if whole else 1


@hide_from_dynamo
def _cut(sequential: nn.Module, value: Any, group: dist.ProcessGroup | None) -> Spans:
    """Return where to cut a chain, from the bytes that its children save for backward with this batch.

    Rank 0's batch decides for all ranks: with different cuts, synchronized batch norm would deadlock.
    """
    measured = _measure(sequential, value)
    if group is not None:
        measured = gather_json(measured, group)[0]
    keys = list(sequential._modules)
    return tuple(tuple(keys[first:end]) for first, end in cut_chain(*measured))


def _measure(sequential: nn.Module, value: Any) -> tuple[list[int], list[bool]]:
    """Return the bytes that each child saves for backward, and True for each child that changes its input in place.

    This is a separate forward pass whose graph saves nothing, so a batch that fits only with recomputation can be
    measured.
    """
    value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
    totals, in_place = [0], []
    devices = {leaf.device for leaf in tensors_in(value) if leaf.is_cuda}
    saved = SavedBytes([*sequential.parameters(), *sequential.buffers()], keep=forget)
    with torch.random.fork_rng(devices=devices), _BufferSnapshot([sequential]), saved:
        for child in sequential._modules.values():
            assert child is not None
            versions = _versions(value)
            output = child(value)
            totals.append(saved.total)
            in_place.append(versions != _versions(value))
            value = output
    return [after - before for before, after in itertools.pairwise(totals)], in_place


# ---- one segment ----

SMALL = 2**14  # elements: more than the channels of a batch norm, less than a mask or a position table


def _recompute(
    function: Callable[..., Any], modules: Sequence[nn.Module], store: HostStore | None, *args: Any, **kwargs: Any
) -> Any:
    """Call ``function(*args, **kwargs)``, which runs ``modules``, and save only its inputs for backward."""
    if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):
        raise UsageError(
            f"recompute: {_plain_name(modules[0])} is given a cache of keys and values, which running it again would "
            "fill twice; set model.config.use_cache = False"
        )
    if torch.compiler.is_compiling() and store is None and _compiles(modules):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return _recompute_eagerly(function, modules, store, args, kwargs)


def _compiles(modules: Iterable[nn.Module]) -> bool:
    """Return True if torch.compile may recompute these modules itself.

    It handles batch norm correctly, but a module that reads a buffer which it changes would change it twice (measured
    with torch 2.13), so modules with other buffers run uncompiled.
    """
    inside = itertools.chain.from_iterable(module.modules() for module in modules)
    return all(isinstance(module, BatchNorm) or not module._buffers for module in inside)


@hide_from_dynamo
def _recompute_eagerly(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    store: HostStore | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    again, tensors = _of_tensors(function, args, kwargs)
    versions = _versions(tensors)
    before = _BufferSnapshot(modules)
    with store.holding(tensors) if store else contextlib.nullcontext():
        output = checkpoint(again, *tensors, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), before))
    before.forward_is_done()
    if versions != _versions(tensors):
        raise UsageError(
            f"recompute: {_plain_name(modules[0])} changes its input in place, so the input cannot be kept; begin the "
            "segment at a module before it, or use inplace=False"
        )
    return output


def _of_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the call as a function of its distinct tensors: ``query is key`` must hold in the recomputation too."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    # The closure must not refer to a tensor: checkpoint saves the tensors, by itself or through the store.
    pattern = [(places[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]

    def again(*given: Tensor) -> Any:
        filled = [leaf if place is None else given[place] for place, leaf in pattern]
        args, kwargs = tree_unflatten(filled, structure)
        return function(*args, **kwargs)

    return again, tensors


class _BufferSnapshot:
    """A snapshot of the buffers of some modules; within its context the modules use copies of the snapshot.

    It can be entered any number of times (``retain_graph``) and left by an exception, which is how torch ends a
    recomputation.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {module: None for root in modules for module in root.modules()}
        self._buffers = [
            (module._buffers, name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._copies = {id(buffer): buffer.detach().clone() for _, _, buffer in self._buffers}
        self._versions = _versions([buffer for _, _, buffer in self._buffers])
        self._weights: list[tuple[nn.Parameter, int]] = []
        self._replaced: list[Tensor | None] = []

    def forward_is_done(self) -> None:
        """Keep copies only of buffers that forward may have changed, and record the versions of the weights.

        Torch's batch norm does not increment the version of the statistics that it changes, so small buffers always
        count as changed.
        """
        unchanged = {
            id(buffer)
            for (_, _, buffer), version in zip(self._buffers, self._versions, strict=True)
            if buffer._version == version and buffer.numel() > SMALL
        }
        self._copies = {key: copy for key, copy in self._copies.items() if key not in unchanged}
        self._weights = [
            (weight, weight._version)
            for module in self._modules
            for weight in module._parameters.values()
            if weight is not None
        ]

    def __enter__(self) -> None:
        for weight, version in self._weights:
            if weight._version != version:
                raise UsageError(
                    f"recompute: a weight of {_plain_name(next(iter(self._modules)))} changed between forward and "
                    "backward; call backward before the optimizer's step"
                )
        fresh = {key: copy.clone() for key, copy in self._copies.items()}
        self._replaced = [buffers[name] for buffers, name, _ in self._buffers]
        for buffers, name, buffer in self._buffers:
            buffers[name] = fresh.get(id(buffer), buffer)

    def __exit__(self, *_: object) -> None:
        for (buffers, name, _buffer), replaced in zip(self._buffers, self._replaced, strict=True):
            buffers[name] = replaced
        self._replaced = []


def _versions(value: Any) -> list[int]:
    """Return the version counters of all tensors, which in-place changes increment."""
    return [tensor._version for tensor in tensors_in(value)]


def _plain_name(module: nn.Module) -> str:
    kind = type(module)
    return str(getattr(kind, _PLAIN, kind).__name__)
