"""``PiecewiseValues``: the values of a recorded tensor, computed piece by piece and written to a rank's part of it.

First values are mostly drawn in order and then scaled, shifted or clipped, number by number. Such a tensor is never
whole in memory: each piece is drawn, what of it belongs to the part is copied there, and the rest is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.construction.random_draws import begin_at, draws_in_order, pieces, restored_generator, state_of
from echelon.construction.tape import Tape, TapeEntry, TensorRef
from echelon.distributed.tensor_layout import Layout
from echelon.distributed.tensor_region import narrow

aten = torch.ops.aten

#: Operations whose result for each number is the same bits in any piece: scalar and vector code round alike.
_EXACT = {
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.neg_.default,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.erfinv_.default,
    aten.fill_.Scalar,
    aten.zero_.default,
    aten.copy_.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.clamp.default,
    aten.clone.default,
    aten._to_copy.default,
}
#: Operations that make a tensor of a size, and the one in place that gives it the same values, if there is one.
_MAKE = {
    aten.zeros.default: None,
    aten.ones.default: None,
    aten.full.default: None,
    aten.randn.default: aten.normal_.default,
    aten.rand.default: aten.uniform_.default,
}
_CHUNK = 1 << 20  #: numbers that are copied to the part at a time, or a row if that is more


class PiecewiseValues:
    """The values of one recorded tensor, if each of its entries works on pieces.

    entries: entries of the tape that have a part in its values, in order
    """

    def __init__(self, ref: TensorRef, entries: Sequence[TapeEntry]) -> None:
        self._ref, self._entries = ref, entries

    @torch.no_grad()
    def write(self, layout: Layout, into: Tensor) -> None:
        """Write the part that a layout describes into ``into``."""
        boxes = list(layout.boxes())
        last = max((offsets[0] + sizes[0] for offsets, sizes, _ in boxes), default=0)
        for first, rows in self._rows(last):
            for offsets, sizes, starts in boxes:
                begin, end = max(offsets[0], first), min(offsets[0] + sizes[0], first + len(rows))
                if begin < end:
                    chosen = rows[begin - first : end - first]
                    taken = narrow(chosen, (0, *offsets[1:]), (end - begin, *sizes[1:]))
                    place = (starts[0] + begin - offsets[0], *starts[1:])
                    narrow(into, place, tuple(taken.shape)).copy_(taken)

    def _rows(self, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values in rows of the first dimension, with the number of their first row, until row ``last``."""
        shape = self._ref.shape
        width = math.prod(shape[1:])
        chunk = torch.empty(max(1, _CHUNK // width) * width, dtype=self._ref.dtype, device="cpu")
        first, filled, total = 0, 0, last * width
        for piece in self._pieces(total):
            used = 0
            while used < len(piece):
                taken = piece[used : used + min(len(chunk), total - first * width) - filled]
                chunk[filled : filled + len(taken)] = taken
                filled, used = filled + len(taken), used + len(taken)
                if filled == len(chunk) or first * width + filled == total:
                    yield first, chunk[:filled].view(-1, *shape[1:])
                    first, filled = first + filled // width, 0
                if first * width == total:
                    return

    def _pieces(self, total: int) -> Iterator[Tensor]:
        """Yield the values as flat pieces, in order, until at least ``total`` of them."""
        states = [entry.state for entry in self._entries]
        for begin, end in pieces(math.prod(self._ref.shape)):
            if begin >= total:
                return
            piece = _Piece(begin, end)
            with restored_generator(), _disable_current_modes(), torch._C.DisableTorchFunction():
                for number, entry in enumerate(self._entries):
                    state = states[number]
                    if state is not None:
                        begin_at(state)
                    piece.repeat(entry)
                    if state is not None:
                        states[number] = state_of(None)
            yield piece.of(self._ref)


class _Piece:
    """The numbers from ``begin`` to ``end`` of each storage that the entries work on."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._held: dict[int, Tensor] = {}

    def of(self, ref: TensorRef) -> Tensor:
        """Return the numbers of a tensor that are in the piece; zeros where no entry has written any."""
        if ref.storage not in self._held:
            self._held[ref.storage] = torch.zeros(self._end - self._begin, dtype=ref.dtype, device="cpu")
        first = max(ref.offset - self._begin, 0)
        return self._held[ref.storage][first : max(first, ref.offset + math.prod(ref.shape) - self._begin)]

    def repeat(self, entry: TapeEntry) -> None:
        """Run an entry on the piece."""
        made = entry.outputs[0]
        if entry.func in _MAKE:
            assert made is not None
            draw = _MAKE[entry.func]
            size = torch.Size([self._end - self._begin])
            fresh = torch.empty(size, dtype=made.dtype) if draw else entry.func(size, *entry.args[1:], **entry.kwargs)
            self._held[made.storage] = draw(fresh) if draw else fresh
            return
        args, kwargs = tree_map_only(TensorRef, self.of, (entry.args, entry.kwargs))
        if len(args[0]):
            result = entry.func(*args, **kwargs)
            if made is not None:
                self._held[made.storage] = result


def piecewise_values(tape: Tape, ref: TensorRef) -> PiecewiseValues | None:
    """Return the piecewise values of a tensor, or None if an entry needs more than a piece of it."""
    entries = tape.parts(ref)
    if not ref.shape or not math.prod(ref.shape) or not _is_whole(ref, math.prod(ref.shape), tape):
        return None
    refs = [
        leaf for leaf in tree_leaves([(e.args, e.kwargs, e.outputs) for e in entries]) if isinstance(leaf, TensorRef)
    ]
    if len({each.storage for each in refs}) < len({(each.storage, each.dtype) for each in refs}):
        return None  # bits of a number are used as another type
    numbers = math.prod(ref.shape)
    return PiecewiseValues(ref, entries) if all(_works_on_pieces(entry, numbers, tape) for entry in entries) else None


def _works_on_pieces(entry: TapeEntry, numbers: int, tape: Tape) -> bool:
    given = tree_leaves((entry.args, entry.kwargs))
    refs = [leaf for leaf in given if isinstance(leaf, TensorRef)]
    if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in given):
        return False
    first = entry.args[0] if entry.args else None
    if not entry.writes or len(entry.outputs) != 1:
        return False
    made = entry.outputs[0]
    if made is not None and not _is_whole(made, numbers, tape):
        return False
    if entry.func in _MAKE:
        return made is not None
    if not isinstance(first, TensorRef) or not _is_flat(first):
        return False
    # Numbers of a part of a tensor are changed where they are; other tensors have the same place for each number.
    changes_part = len(refs) == 1 and made is None
    if not changes_part and not all(_is_whole(ref, numbers, tape) for ref in refs):
        return False
    if entry.state is not None:
        whole = torch.empty(first.shape, dtype=first.dtype, device="meta")
        return math.prod(first.shape) == numbers and draws_in_order(entry.func, whole)
    return entry.func in _EXACT and entry.kwargs.get("alpha", 1) == 1


def _is_whole(ref: TensorRef, numbers: int, tape: Tape) -> bool:
    return math.prod(ref.shape) == numbers and _is_flat(ref) and tape.covers(ref)


def _is_flat(ref: TensorRef) -> bool:
    """Return True if a tensor lies in its storage number by number, in its own order."""
    return torch.empty_strided(ref.shape, ref.stride, device="meta").is_contiguous()
