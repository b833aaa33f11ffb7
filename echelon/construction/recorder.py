"""``ConstructionRecorder``: records what a constructor does to tensors that become weights, without their memory.

Floating-point tensors from factories such as ``torch.empty`` and ``torch.randn`` are on ``meta``, and what is computed
from them is recorded; all other tensors are real. A random operation also advances the generator, so that everything
after it draws what it would draw otherwise. An operation that needs values gets them, computed from the tape.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.errors import UsageError
from echelon.construction.random_draws import advance, draws_in_order, is_random, state_of
from echelon.construction.tape import Tape, TapeEntry, TensorRef, written_refs

aten = torch.ops.aten

_FACTORIES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.rand.generator,
    aten.randn.default,
    aten.randn.generator,
    aten.normal.float_float,
}
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
#: In-place operations of whose operand no earlier value is left.
_FILLS = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.copy_.default,
}


class ConstructionRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on a tape.

    draws: False keeps the generators still; each random operation then gets a seed of its own, made from theirs
    """

    def __init__(self, tape: Tape, draws: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self._draws = tape, draws
        self._seed = torch.default_generator.initial_seed()
        self._seeds = 0
        self._constants: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation would import the compiler: some seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(tensor in self.tape for tensor in given):
                return self._on_recorded(func, args, kwargs)
            if _is_weight(func, kwargs):
                return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    # ---- tensors made ----

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        made: Tensor = func(*args, **_on_meta({"device": "cpu", **kwargs}))
        self._record(func, args, kwargs, [made], given=[])
        return made

    # ---- operations on recorded tensors ----

    def _on_recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        _refuse_other_devices(kwargs)
        written = [leaf for leaf in written_refs(func, args, kwargs) if isinstance(leaf, Tensor)]
        if _reads_values(func) or not all(tensor in self.tape for tensor in written):
            return self._on_values(func, args, kwargs, written)
        try:
            result = func(*tree_map(self._shown, args), **tree_map(self._shown, _on_meta(kwargs)))
        except (NotImplementedError, RuntimeError):  # no rule for shapes alone: an error of the call itself comes again
            return self._on_values(func, args, kwargs, written)
        if func.is_view:
            return result
        results = tree_leaves(result)
        made = [leaf if isinstance(leaf, Tensor) and leaf not in self.tape else None for leaf in results]
        self._record(func, args, kwargs, made, given=written)
        return result

    def _shown(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf in self.tape or leaf.dim() == 0:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor | None], given: list[Tensor]
    ) -> None:
        """Add an entry that creates the tensors ``made`` and changes the tensors ``given``."""
        for tensor in made:
            if tensor is not None:
                self.tape.adopt(tensor)
        if func in _EMPTY:
            return
        state = self._draw(func, args, kwargs) if is_random(func) else None
        args, kwargs = tree_map(self._referred, (args, _on_cpu(kwargs)))
        outputs = tuple(None if tensor is None else self.tape.ref(tensor) for tensor in made)
        created = {ref.storage for ref in outputs if ref is not None}
        changed = [self.tape.ref(tensor) for tensor in given]
        filled = {ref.storage for ref in changed if func in _FILLS and self.tape.covers(ref)}
        used = {leaf.storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TensorRef)}
        source = args[1] if func is aten.copy_.default else None
        if not isinstance(source, TensorRef) or source.storage not in filled:
            used -= filled
        writes = (*created, *(ref.storage for ref in changed))
        self.tape.add(TapeEntry(func, args, kwargs, outputs, tuple(used), writes, frozenset(created | filled), state))

    def _referred(self, leaf: Any) -> Any:
        """Return what the tape keeps of an operand: a reference, or a copy of a real tensor as it is now."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf in self.tape:
            return self.tape.ref(leaf)
        known = self._constants.get(id(leaf))
        if known is not None and known[0]() is leaf and known[1] == leaf._version:
            return known[2]
        with _disable_current_modes():
            copied = leaf.detach().clone()
        self._constants[id(leaf)] = (weakref.ref(leaf), leaf._version, copied)
        return copied

    # ---- random numbers ----

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return the state that an operation draws from, and advance the generator as it does."""
        if not self._draws:
            self._seeds += 1
            return torch.tensor((self._seed * 1_000_003 + self._seeds * 7_919) % 2**63)
        state = state_of(kwargs.get("generator"))
        first = args[0] if args else None
        if isinstance(first, Tensor) and draws_in_order(func, first):
            advance(func, first, args[1:], kwargs)
        else:
            real = self._reals((args, kwargs))
            func(*real[0], **real[1])
        return state

    # ---- values ----

    def _reals(self, tree: Any) -> Any:
        """Return a tree with values in place of recorded tensors."""
        recorded = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf in self.tape}
        values = self.tape.values([self.tape.ref(tensor) for tensor in recorded.values()])
        found = dict(zip(recorded, values, strict=True))
        return tree_map(lambda leaf: found.get(id(leaf), leaf), tree)

    def _on_values(self, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        """Run an operation on values, and record the tensors that it has changed as they are then."""
        (real_args, real_kwargs), changed = self._reals(((args, kwargs), written))
        with _disable_current_modes():
            result = func(*real_args, **real_kwargs)
        for tensor, value in zip(written, changed, strict=True):
            if tensor in self.tape:
                self.tape.write(tensor, value)
        given = {id(value): tensor for tensor, value in zip(written, changed, strict=True)}
        return tree_map(lambda leaf: given.get(id(leaf), leaf), result)

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of a recorded tensor."""
        return self.tape.values([self.tape.ref(tensor)])[0]


def _is_weight(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a factory makes a tensor to record: such as weights are made of, or one for a recorded tensor."""
    if kwargs.get("device") == torch.device("meta"):
        return True
    if func not in _FACTORIES or kwargs.get("layout") not in (None, torch.strided):
        return False
    _refuse_other_devices(kwargs)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return bool(dtype.is_floating_point or dtype.is_complex)


def _refuse_other_devices(kwargs: dict[str, Any]) -> None:
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type not in ("cpu", "meta"):
        raise UsageError(
            f"deferred(): the constructor makes weights on '{device}', and their first values are computed on the CPU; "
            "leave the device out, distribute() moves each rank's part to its device"
        )


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {"device": torch.device("meta"), "pin_memory": False, "generator": None}
    return {name: changed.get(name, value) if value is not None else None for name, value in kwargs.items()}


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a repetition: it draws from the default generator, set to the state of the given one."""
    changed = {"device": torch.device("cpu"), "generator": None}
    return {name: changed.get(name, value) if value is not None else None for name, value in kwargs.items()}


def _reads_values(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
