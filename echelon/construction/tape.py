"""``Tape``: the operations of a construction, any of whose tensors can be computed from it.

Tensors are known by their storage, so views need no entries: a reference names a storage and the place in it. A tensor
is computed by those entries alone that have a part in its values, in their order, with the generator's state of each.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from echelon.construction.random_draws import begin_at, draw, draws_in_order, restored_generator


@dataclass(frozen=True, eq=False)
class TensorRef:
    """The place of a tensor in a recorded storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view_in(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class TapeEntry:
    """One recorded operation.

    func:    operation, called with ``args`` and ``kwargs``, in which a TensorRef stands for each recorded tensor
    outputs: references of the tensors that it creates, None for other results
    reads:   storages whose values it uses
    writes:  storages that it changes or creates
    fills:   storages among these of which no earlier value is left
    state:   state of the generator that it draws from
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fills: frozenset[int]
    state: Tensor | None


class Tape:
    """Recorded operations, and the storages that they work on.

    Storages are on ``meta``: they take no memory, and the tape keeps them so that no other gets their identity.
    """

    def __init__(self) -> None:
        self._entries: dict[int, TapeEntry] = {}
        self._count = 0
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._storages

    def adopt(self, tensor: Tensor) -> None:
        """Make the storage of a tensor on ``meta`` known. Its values are zeros until an entry writes them."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def ref(self, tensor: Tensor) -> TensorRef:
        return TensorRef(
            tensor.untyped_storage()._cdata,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def add(self, entry: TapeEntry) -> None:
        self._entries[self._count] = entry
        for storage in entry.writes:
            self._writers[storage].append(self._count)
        self._count += 1

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Add an entry that gives the storage of ``tensor`` the bytes of the storage of ``value``."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value.untyped_storage())
        target = TensorRef(storage._cdata, torch.uint8, (storage.nbytes(),), (1,), 0)
        written = (storage._cdata,)
        copy = torch.ops.aten.copy_.default
        self.add(TapeEntry(copy, (target, whole), {}, (None,), (), written, frozenset(written), None))

    def covers(self, ref: TensorRef) -> bool:
        """Return True if a tensor fills its storage."""
        whole = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device="meta")
        dense = torch.ops.aten.is_non_overlapping_and_dense(whole)
        return bool(dense) and whole.nbytes == self._storages[ref.storage].nbytes()

    def entries(self) -> Iterable[TapeEntry]:
        return self._entries.values()

    def keep(self, wanted: Iterable[int]) -> None:
        """Drop the entries that have no part in the values of these storages."""
        kept = self._parts(wanted)
        self._entries = {number: self._entries[number] for number in kept}
        self._writers.clear()
        for number, entry in self._entries.items():
            for storage in entry.writes:
                self._writers[storage].append(number)

    def parts(self, ref: TensorRef) -> list[TapeEntry]:
        """Return the entries that have a part in the values of a tensor, in order."""
        return [self._entries[number] for number in self._parts({ref.storage})]

    def values(self, refs: Sequence[TensorRef]) -> list[Tensor]:
        """Compute recorded tensors as they are now, on the CPU. Tensors of one storage share it."""
        wanted = {ref.storage for ref in refs}
        with restored_generator(), torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            storages = self._run(self._parts(wanted), wanted)
            return [ref.view_in(storages[ref.storage]) for ref in refs]

    def _parts(self, wanted: Iterable[int]) -> list[int]:
        """Return the numbers of the entries that have a part in the values of these storages, in order."""
        found: set[tuple[int, int]] = set()
        left = [(storage, self._count) for storage in wanted]
        while left:
            storage, before = left.pop()
            writers = self._writers.get(storage, [])
            for at in range(bisect.bisect_left(writers, before) - 1, -1, -1):
                number = writers[at]
                if (storage, number) in found:
                    break
                found.add((storage, number))
                entry = self._entries[number]
                left.extend((read, number) for read in entry.reads)
                if storage in entry.fills:
                    break
        return sorted({number for _, number in found})

    def _run(self, numbers: Sequence[int], wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        last = {s: n for n in numbers for s in (*self._entries[n].reads, *self._entries[n].writes)}
        storages: dict[int, torch.UntypedStorage] = {}
        for number in numbers:
            entry = self._entries[number]
            for storage in {*entry.reads, *entry.writes} - storages.keys():
                if storage not in _created(entry):
                    storages[storage] = self._memory(storage, zeros=storage not in entry.fills)
            _repeat(entry, storages)
            for storage in {*entry.reads, *entry.writes}:
                if last[storage] == number and storage not in wanted:
                    del storages[storage]
        for storage in wanted:
            if storage not in storages:
                storages[storage] = self._memory(storage, zeros=True)
        return storages

    def _memory(self, storage: int, zeros: bool) -> torch.UntypedStorage:
        """Return memory for a storage; zeros where no entry writes, so that it is the same on every rank."""
        make = torch.zeros if zeros else torch.empty
        return make(self._storages[storage].nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()


def _created(entry: TapeEntry) -> set[int]:
    return {ref.storage for ref in entry.outputs if ref is not None}


def _repeat(entry: TapeEntry, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run an entry on memory."""

    def real(leaf: Any) -> Any:
        return leaf.view_in(storages[leaf.storage]) if isinstance(leaf, TensorRef) else leaf

    args, kwargs = tree_map(real, (entry.args, entry.kwargs))
    if entry.state is not None:
        begin_at(entry.state)
    if entry.args and isinstance(entry.args[0], TensorRef) and draws_in_order(entry.func, args[0]):
        draw(entry.func, args[0], args[1:], kwargs)
        return
    results = tree_leaves(entry.func(*args, **kwargs))
    for ref, result in zip(entry.outputs, results, strict=False):
        if ref is not None:
            storages[ref.storage] = _placed(ref, result)


def _placed(ref: TensorRef, result: Tensor) -> torch.UntypedStorage:
    """Return the storage of a result, laid out as it was recorded."""
    if (result.stride(), result.storage_offset()) == (ref.stride, ref.offset):
        return result.untyped_storage()
    whole = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device="cpu")
    return whole.copy_(result).untyped_storage()


def written_refs(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation changes, according to its schema."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(value)
