"""Find the activations that each module saves for backward, by a forward pass with fake tensors.

Each storage is counted once, and weights are not counted. A saved tensor belongs to the innermost module that runs when
autograd saves it, or to the loss if no module runs. In a pipeline it also belongs to a stage: the stage of the running
unit, or, between two units, the stage of the next unit, which runs the code between them. A storage that two stages
save is counted on both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.process_groups import ProcessGroups
from echelon.engine.parallelize import local_segments
from echelon.plan import Plan
from echelon.plan.fake_forward import placeholder_mode, preserve_rng_state
from echelon.plan.segments import Segments, cut_chain
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_split import fake_process_group, split_first
from echelon.planner.profiling.fake_step import batch_placeholders
from echelon.planner.profiling.gpu_dispatch import GpuDispatchMode
from echelon.planner.profiling.op_tracer import OpTracer
from echelon.planner.profiling.profile import Profile
from echelon.strategy.annotations.marks import within

#: Owner of tensors that are saved while no module runs.
LOSS = "(loss)"
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class SavedActivations:
    """Bytes saved for backward, by module name.

    made:   tensors that a micro-batch computes
    given:  tensors of the batch itself, which all micro-batches view
    """

    made: Counter[str] = dataclasses.field(default_factory=Counter)
    given: Counter[str] = dataclasses.field(default_factory=Counter)


def kept_by_stage(profile: Profile, plan: Plan, samples: int) -> dict[int, SavedActivations]:
    """Return, by stage, the activations that one micro-batch of ``samples`` saves for backward.

    A segment that is recomputed saves only its input.
    """
    return _pass(profile, plan, samples, segments_of(profile, plan, samples))


def segments_of(profile: Profile, plan: Plan, samples: int) -> Segments:
    """Return the recomputed segments. Chains are cut by the bytes that their children save, found by a first pass."""
    segments, chains = _recomputed(plan)
    if not chains:
        return segments
    found = _pass(profile, plan, samples, segments)
    whole = {name: size for kept in found.values() for name, size in kept.made.items()}
    return (*segments, *(part for name in chains for part in _chain(profile.model, name, whole)))


def _recomputed(plan: Plan) -> tuple[Segments, tuple[str, ...]]:
    """Return the recomputed segments and chains of all stages."""
    grids = (MeshGroups(plan.mesh, plan.order, rank, ProcessGroups("gloo")) for rank in range(plan.ranks))
    first = {grid.coords["stage"]: grid for grid in grids}
    result = [local_segments(plan, grid) for grid in first.values()]
    return tuple(part for parts, _ in result for part in parts), tuple(name for _, names in result for name in names)


def _chain(model: nn.Module, name: str, kept: Mapping[str, int]) -> Segments:
    children = {f"{name}.{key}" if name else key: child for key, child in model.get_submodule(name).named_children()}
    sizes = [sum(size for inside, size in kept.items() if within(inside, child)) for child in children]
    in_place = [bool(getattr(child, "inplace", False)) for child in children.values()]
    names = list(children)
    return tuple(tuple(names[first:end]) for first, end in cut_chain(sizes, in_place))


def _pass(profile: Profile, plan: Plan, samples: int, segments: Segments) -> dict[int, SavedActivations]:
    shadow, split = FakeModel(profile.model, []), plan.mesh.get("split", 1)
    batch = batch_placeholders(profile.placeholders(samples))
    if plan.low_memory is not None:
        _narrow(shadow.model)
    with contextlib.ExitStack() as within_all:
        group = within_all.enter_context(fake_process_group(split))
        if split > 1:
            split_first(shadow, plan.splits, group, plan.batch_per_split_rank)
        seen = _ActivationTracker(shadow.model, segments, plan.stages.units if plan.stages else {}, batch)
        for context in (placeholder_mode(), preserve_rng_state(), torch.enable_grad()):
            within_all.enter_context(context)
        within_all.enter_context(OpTracer())  # answers collectives of the fake group, and reads of fake values
        within_all.enter_context(seen.watching())
        if profile.device == "cuda":
            within_all.enter_context(GpuDispatchMode())
        if plan.amp is not None:
            within_all.enter_context(torch.autocast("cpu", dtype=_AMP[plan.amp.dtype]))
        loss = profile.step(shadow.model, batch)
        result = seen.by_stage()
    del loss  # its graph kept the saved tensors alive up to here
    torch.clear_autocast_cache()
    return result


def _narrow(model: nn.Module) -> None:
    """Cast trained weights to bf16, as low_memory does; autocast then makes no copies of them."""
    with placeholder_mode(), torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


class _ActivationTracker:
    """Tracks which module and stage run in a forward pass, and which storages are saved there."""

    def __init__(self, model: nn.Module, segments: Segments, units: Mapping[str, int], batch: Any) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model, self._units = model, units
        self._recomputed = {name for names in segments for name in names}
        self._first = {names[0] for names in segments}
        self._running: list[str] = []
        self._inside = 0  # number of recomputed modules that are running
        self._stage: int | None = None  # stage of the running unit
        self._batch = {_address(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        self._weights = {_address(value) for value in (*model.parameters(), *model.buffers())}
        self._kept: dict[tuple[int | None, int], tuple[str, int, Any]] = {}  # stage, address: owner, bytes, weak ref.
        self._held: list[Tensor] = []  # inputs of recomputed segments

    def by_stage(self) -> dict[int, SavedActivations]:
        self._assign(max(self._units.values(), default=0))
        result: dict[int, SavedActivations] = {}
        for (stage, address), (owner, size, _) in self._kept.items():
            assert stage is not None
            own = result.setdefault(stage, SavedActivations())
            (own.given if address in self._batch else own.made)[owner] += size
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            handles.append(module.register_forward_hook(self._left, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[id(module)]
        self._running.append(name)
        if name in self._units:
            self._stage = self._units[name]
            self._assign(self._stage)
        if name in self._recomputed:
            if not self._inside and name in self._first:
                given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self._held += [leaf.detach() for leaf in given]
                for leaf in given:
                    self._note(leaf)
            self._inside += 1

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._running.pop()
        self._inside -= name in self._recomputed
        if name in self._units:
            self._stage = None

    def _assign(self, stage: int) -> None:
        """Assign to ``stage`` all storages saved since the last unit."""
        for (at, address), (owner, size, _) in list(self._kept.items()):
            if at is None:
                _, _, reference = self._kept.pop((at, address))
                storage = reference()
                if storage is not None and (stage, address) not in self._kept:
                    self._add(stage, address, owner, size, storage)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self._inside:
            self._note(tensor)
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address not in self._weights and (self._stage, address) not in self._kept:
            owner = self._running[-1] if self._running else LOSS
            self._add(self._stage, address, owner, storage.nbytes(), storage)

    def _add(self, stage: int | None, address: int, owner: str, size: int, storage: Any) -> None:
        reference = weakref.ref(storage, lambda _: self._kept.pop((stage, address), None))
        self._kept[stage, address] = owner, size, reference


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
