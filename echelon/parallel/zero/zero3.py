"""ZeRO level 3: a unit's parameters are unsharded while its module runs, and while its backward needs them.

Forward: the module's class is replaced by one that unshards before forward and reshards afterwards
(sharded_modules.py). A parameter that is used outside of its own module is gathered when it is read as an attribute of
its module, and stays until the module that is running then has finished.

Backward: for weights that autograd would save, and for 16-bit copies that autocast makes of them, saved-tensor hooks
save a note instead. When autograd unpacks the note, the unit is gathered; it is resharded when the last note of that
forward was unpacked. Memory is never freed while in use: a tensor that still refers to the weights keeps them alive.

Recomputed modules save no notes. If the recomputed module contains the unit, the unit's forward runs again and gathers
it; if it is the unit itself, a hook on its output reports when its backward begins. A recomputation gets frozen
parameters as aliases, because torch.utils.checkpoint saves the object itself, which is NaN after the unit is resharded.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from echelon.base.errors import UsageError
from echelon.base.lazy_dynamo import hide_from_dynamo
from echelon.optim.foreach import HALVES
from echelon.parallel.zero.gather_order import GatherOrder
from echelon.parallel.zero.shard_unit import ShardUnit
from echelon.parallel.zero.zero_collectives import ShardCollectives


@dataclass(eq=False)
class _UnitUse:
    """One forward run of a unit, with the notes that its backward will unpack."""

    unit: ShardUnit
    notes: int = 0
    left: int = 0  # notes that this backward has not unpacked yet
    backward: int = -1  # the number of this backward
    holding: bool = False


@dataclass(frozen=True, eq=False)
class _SavedWeight:
    """Note that autograd saves in place of a weight, of a view of it, or of a 16-bit copy of it."""

    use: _UnitUse
    parameter: nn.Parameter
    shard: nn.Parameter
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _ModuleCall:
    """A running module, and the units that are unsharded for it."""

    held: list[ShardUnit] = field(default_factory=list)
    uses: list[_UnitUse] = field(default_factory=list)


class ParamGatherer:
    """Unshards and reshards units in forward and backward."""

    def __init__(
        self,
        units: Sequence[ShardUnit],
        exchange: ShardCollectives,
        device: torch.device,
        between: Callable[[], None],
    ) -> None:
        """between: called before each wait for an all-gather"""
        self.units = units
        self.passes = GatherOrder(units, exchange, device, between)
        self._of = {id(p): unit for unit in units for p in unit.parameters.values()}
        self._shard_of = {id(unit.parameters[name]): unit.shards[name] for unit in units for name in unit.shards}
        self._memory: dict[int, tuple[ShardUnit, nn.Parameter, Tensor]] = {}  # unsharded parameters by address
        self._calls: list[_ModuleCall] = []
        self._in_use: dict[ShardUnit, _UnitUse] = {}
        self._backwards = 0
        self._uses: list[_UnitUse] = []  # uses whose unit is held by this backward
        self._held_until: dict[ShardUnit, set[int]] = {}  # gradients until which this backward holds a unit
        self.active = True
        self.is_prepared = False  #: True while a module runs all of whose parameters have been unsharded before
        self.present, self.most = 0, 0  #: bytes of unsharded parameters now, and their maximum so far
        for unit in units:
            for parameter in unit.parameters.values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        functools.partial(_made, weakref.ref(self))
                    )

    @property
    def is_outside(self) -> bool:
        """True while no module runs: a module that the user's loop then calls itself is treated as the whole model."""
        return not self._calls

    def brings(self, parameter: nn.Parameter | None) -> bool:
        return id(parameter) in self._of

    # ---- holders of units ----

    def units_of(self, module: nn.Module) -> list[ShardUnit]:
        """Return the units of all parameters of a module and of those inside it."""
        units = (self._of.get(id(parameter)) for parameter in module.parameters())
        return list({id(unit): unit for unit in units if unit is not None}.values())

    def hold(self, unit: ShardUnit) -> None:
        if not unit.here:
            with torch.inference_mode(False):  # parameters gathered in evaluation may still be used in training
                self.passes.reach(unit)
            for parameter, whole in unit.wholes:
                self._memory[whole.untyped_storage().data_ptr()] = (unit, parameter, whole)
            self.present += unit.bytes
            self.most = max(self.most, self.present)
        unit.holders += 1

    def release(self, unit: ShardUnit) -> None:
        unit.holders -= 1
        if unit.holders == 0:
            for _, whole in unit.wholes:
                self._memory.pop(whole.untyped_storage().data_ptr(), None)
            unit.leave()
            self.present -= unit.bytes

    def lend(self, parameter: nn.Parameter) -> nn.Parameter:
        """Gather and return a parameter that is read from its module; in a recomputation, an alias if it is frozen."""
        self.touch(parameter)
        if parameter.requires_grad or not _in_backward() or id(parameter) not in self._of:
            return parameter
        alias = torch.Tensor._make_subclass(type(parameter), parameter.detach(), False)
        alias.__dict__.update(parameter.__dict__)
        return alias

    @hide_from_dynamo
    def touch(self, parameter: nn.Parameter) -> None:
        unit = self._of.get(id(parameter))
        if unit is None or unit.here:
            return
        if self._calls:
            self._hold_for(self._calls[-1], unit)
        elif _in_backward():
            self._begin_backward()
            self._hold_in_backward(unit)

    # ---- forward ----

    @contextlib.contextmanager
    def call(self, unit: ShardUnit | None, whole_model: bool) -> Iterator[_ModuleCall]:
        """Hold ``unit`` within the context, while its module or the whole model runs."""
        begins = whole_model and self._begin_forward()
        call = _ModuleCall()
        self._calls.append(call)
        complete = False
        try:
            if unit is not None:
                self._hold_for(call, unit)
            with self._saving(), _uncached_casts():
                yield call
            complete = True
        finally:
            self._calls.remove(call)
            for use in call.uses:
                self._in_use.pop(use.unit, None)
            for held in call.held:
                self.release(held)
            if begins:
                self.passes.end(complete)

    @contextlib.contextmanager
    def prepared(self, call: _ModuleCall, units: Sequence[ShardUnit]) -> Iterator[None]:
        """Hold all units that a module uses within the context, in which no module inside it unshards any.

        Compiled code of the module is then free of calls that torch.compile cannot trace.
        """
        for unit in units:
            if unit not in call.held:
                self._hold_for(call, unit)
        self.is_prepared = True
        try:
            yield
        finally:
            self.is_prepared = False

    def _begin_forward(self) -> bool:
        if self.passes.kind == "backward" and not _in_backward():  # the last backward raised an exception
            self._end_backward(complete=False)
        if self.passes.kind is not None:
            return False
        self.passes.begin("forward")
        return True

    def _hold_for(self, call: _ModuleCall, unit: ShardUnit) -> None:
        self.hold(unit)
        call.held.append(unit)
        if unit not in self._in_use:
            self._in_use[unit] = _UnitUse(unit)
            call.uses.append(self._in_use[unit])

    # ---- tensors saved by autograd ----

    def _saving(self) -> contextlib.AbstractContextManager[object]:
        if not torch.is_grad_enabled() or _saves_tensors():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):  # fake: another stage computes it
            return tensor
        found = self._memory.get(tensor.untyped_storage().data_ptr())
        if found is not None and tensor.dtype == found[2].dtype:
            note = self._note(tensor, found[0], found[1])
        else:
            note = self._note_of_cast(tensor)
        return (tensor, tensor._version) if note is None else note

    def _note_of_cast(self, tensor: Tensor) -> _SavedWeight | None:
        if tensor.dtype not in HALVES:
            return None
        base = tensor if tensor._base is None else tensor._base
        made_by = base.grad_fn
        if made_by is None or made_by.name() != "ToCopyBackward0":
            return None
        source = getattr(made_by.next_functions[0][0], "variable", None)
        unit = self._of.get(id(source))
        if source is None or unit is None or not unit.here or source.stride() != base.stride():
            return None
        return self._note(tensor, unit, source)

    def _note(self, tensor: Tensor, unit: ShardUnit, parameter: nn.Parameter) -> _SavedWeight | None:
        use = self._in_use.get(unit)
        if use is None:
            return None
        use.notes += 1
        shard = self._shard_of[id(parameter)]
        return _SavedWeight(
            use,
            parameter,
            shard,
            version=shard._version,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _SavedWeight):
            return self._unsharded(kept)
        tensor, version = kept
        if tensor._version != version:  # torch does not check this itself for hooked tensors
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}, expected {version}"
            )
        return tensor  # type: ignore[no-any-return]

    def _unsharded(self, note: _SavedWeight) -> Tensor:
        if note.shard._version != note.version:
            raise UsageError("a weight changed between forward and backward; call backward before the optimizer's step")
        self._begin_backward()
        use = note.use
        if use.backward != self._backwards:
            use.backward, use.left = self._backwards, use.notes
        if not use.holding:
            self.hold(use.unit)
            use.holding = True
            self._uses.append(use)
        whole = note.parameter.detach().to(note.dtype)
        wanted = whole.as_strided(note.size, note.stride, note.offset)
        use.left -= 1
        if use.left <= 0:
            self._uses.remove(use)
            use.holding = False
            self.release(use.unit)
        return wanted

    # ---- backward ----

    def watch_output(self, call: _ModuleCall, unit: ShardUnit, output: Any) -> None:
        """Gather the unit before its backward if autograd saved none of its weights: it may be recomputed."""
        if unit.embedding_only or any(use.notes for use in call.uses) or not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(  # type: ignore[no-untyped-call]
                    functools.partial(_reached, weakref.ref(self), weakref.ref(unit))
                )

    def reached(self, unit: ShardUnit) -> None:
        self._begin_backward()
        self._hold_in_backward(unit)

    def made(self, parameter: Tensor) -> None:
        """Record that backward has computed the gradient of ``parameter``; release its unit after the last one."""
        self._begin_backward()
        unit = self._of[id(parameter)]
        missing = self._held_until.get(unit)
        if missing is not None:
            missing.discard(id(parameter))
            if not missing:
                del self._held_until[unit]
                self.release(unit)

    def _hold_in_backward(self, unit: ShardUnit) -> None:
        if unit not in self._held_until:
            self.hold(unit)
            self._held_until[unit] = {id(p) for p in unit.parameters.values() if p.requires_grad}

    def _begin_backward(self) -> None:
        if self.passes.kind is None and _in_backward():
            self.passes.begin("backward")
            self._backwards += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self, complete: bool = True) -> None:
        for use in self._uses:
            use.holding = False
            self.release(use.unit)
        for unit in self._held_until:
            self.release(unit)
        self._uses, self._held_until = [], {}
        self.passes.end(complete)


def _made(visits: weakref.ref[ParamGatherer], parameter: Tensor) -> None:
    living = visits()
    if living is not None and living.active:
        living.made(parameter)


def _reached(visits: weakref.ref[ParamGatherer], unit: weakref.ref[ShardUnit], _: Tensor) -> None:
    living, found = visits(), unit()
    if living is not None and found is not None:
        living.reached(found)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _saves_tensors() -> bool:
    """Return True if saved-tensor hooks are active already: our own, or those of a recomputation, which must run."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def _uncached_casts() -> Iterator[None]:
    """Disable autocast's weight cache: it would keep a 16-bit copy of every weight until the end of forward."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
