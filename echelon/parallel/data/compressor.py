"""Deep gradient compression: what one rank still owes the others, which part of it leaves, and how all parts land.

Lin et al., "Deep Gradient Compression", ICLR 2018. A gradient is added to a momentum ``u``, which is added to what is
not yet sent, ``v``; the largest entries of ``v`` leave, and ``u`` and ``v`` start from nothing there (factor masking).

What is conserved, entry by entry, after any number of steps with gradients g:

    sent + v = sum of all that was ever added to v               and, with D the momentum that masking discarded,
    (1 - momentum) * (sent + v) + momentum * (u + D) = sum of g

the second for plain and for Nesterov momentum alike; without momentum both say ``sent + v = sum of g``.

Entries of all compressed parameters are numbered in one fused space, row-major within a parameter whatever its memory
layout, so that ranks agree and checkpoints do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate as running_sum

import torch
from torch import Tensor

from echelon.base.errors import CheckpointError, UsageError
from echelon.parallel.data.topk import largest

_CHUNK = 1 << 17  # entries worked on at a time on a CPU: what is cast or converted on the way stays in the cache
_SHORT = (torch.float16, torch.bfloat16)


def schedule_sparsity(step: int, begin: int, rampup_step: int, sparsities: Sequence[float]) -> float | None:
    """The sparsity of ``step``: the list walked evenly in ``rampup_step`` steps; ``None``, dense, before ``begin``."""
    if rampup_step < 1 or not sparsities:
        found = f"rampup_step={rampup_step} and {len(sparsities)} sparsities"
        raise UsageError(f"a sparsity schedule was given {found}; give at least one step and one sparsity")
    if step < begin:
        return None
    return sparsities[min((step - begin) * len(sparsities) // rampup_step, len(sparsities) - 1)]


def count_sent_entries(size: int, sparsity: float) -> int:
    """How many of ``size`` entries leave: at least one."""
    if not 0.0 <= sparsity <= 1.0:
        raise UsageError(f"the sparsity is {sparsity}; it is the share of entries held back, from 0 to 1")
    return max(1, round(size * (1.0 - sparsity)))


class Compressor:
    """The momentum and the unsent gradient of one rank, for all compressed parameters."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], device: torch.device | str) -> None:
        self.names, self.sizes = tuple(names), tuple(sizes)
        self.offsets = (0, *running_sum(sizes))[:-1]  #: where each parameter begins in the fused space
        total = sum(sizes)
        #: Of the indices that travel: 4 bytes each while they suffice.
        self.index_dtype = torch.int32 if total < 2**31 else torch.int64
        self._u, self._v = (torch.zeros(total, dtype=torch.float32, device=device) for _ in "uv")
        self._us, self._vs = torch.split(self._u, list(sizes)), torch.split(self._v, list(sizes))

    @torch.no_grad()
    def accumulate(self, index: int, grad: Tensor, momentum: float, nesterov: bool = False) -> None:
        """Take in the gradient of parameter ``index``, weight decay and all scaling already in it."""
        if grad.is_sparse or grad.numel() != self.sizes[index]:
            kind = "sparse" if grad.is_sparse else f"{grad.numel()}-entry"
            wanted = f"a dense one of {self.sizes[index]}"
            raise UsageError(f"'{self.names[index]}' got a {kind} gradient, compression needs {wanted}; leave it dense")
        grad = grad.detach().view(-1) if grad.is_contiguous() else grad.detach()
        rows = self._rows_at_once(grad)
        tensors = (grad, self._us[index].view(grad.shape), self._vs[index].view(grad.shape))
        for g, u, v in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True):
            if nesterov:
                u.add_(g).mul_(momentum)
                v.add_(u).add_(g)
            else:
                torch.add(g, u, alpha=momentum, out=u)
                v.add_(u)

    def counts(self, sparsity: float) -> list[int]:
        """How many entries of each parameter ``select`` returns: the same on every rank."""
        return [count_sent_entries(size, sparsity) for size in self.sizes]

    def count(self, sparsity: float) -> int:
        """How many entries ``select`` returns: the same on every rank."""
        return sum(self.counts(sparsity))

    @torch.no_grad()
    def select(self, sparsity: float, wire: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The entries that leave, parameter by parameter: fused indices, and values in fp32 or the ``wire`` dtype.

        What a 16-bit value cannot say stays in ``v``: the rounding error, and whatever is beyond the largest finite
        number of the wire dtype, which is then what leaves. ``v`` must be finite.
        """
        parts = zip(self._vs, self.counts(sparsity), self.offsets, strict=True)
        found = [largest(v, k).to(self.index_dtype).add_(offset) for v, k, offset in parts]
        indices = torch.cat(found) if found else torch.empty(0, dtype=self.index_dtype, device=self._v.device)
        values = self._v.index_select(0, indices)
        if wire is None or wire == torch.float32:
            self._settle(indices, None)
            return indices, values
        bound = torch.finfo(wire).max
        sent = values.clamp(-bound, bound).to(wire)
        self._settle(indices, values.sub_(sent))
        return indices, sent

    def _settle(self, indices: Tensor, left: Tensor | None) -> None:
        """No momentum where something was sent, and only what is ``left`` of the gradient."""
        step = _CHUNK if indices.device.type == "cpu" else max(1, indices.numel())
        for start in range(0, indices.numel(), step):
            here = indices[start : start + step].long()  # filling takes no other
            self._u.index_fill_(0, here, 0.0)
            if left is None:
                self._v.index_fill_(0, here, 0.0)
            else:
                self._v.index_copy_(0, here, left[start : start + step])

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, as views: ``u.<name>`` and ``v.<name>``, each flat."""
        parts = [(f"u.{name}", u) for name, u in zip(self.names, self._us, strict=True)]
        return dict(parts + [(f"v.{name}", v) for name, v in zip(self.names, self._vs, strict=True)])

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Become the state that ``tensors`` gave on a rank like this one."""
        mine = self.tensors()
        if odd := sorted(mine.keys() ^ state.keys()):
            where = "is missing from" if odd[0] in mine else "is unknown but in"
            raise CheckpointError(
                f"'{odd[0]}' {where} the compression state; load one of the same compressed parameters"
            )
        for key, mine_now in mine.items():
            mine_now.copy_(_fitting(key, state[key], mine_now))

    @torch.no_grad()
    def add(self, name: str, u: Tensor, v: Tensor) -> None:
        """Owe ``u`` and ``v`` of parameter ``name`` on top: so one rank takes over from others that are gone."""
        mine = self.tensors()
        for key, more in ((f"u.{name}", u), (f"v.{name}", v)):
            if key not in mine:
                raise CheckpointError(f"'{name}' has a compression state but is not compressed here; compress it again")
            mine[key].add_(_fitting(key, more, mine[key]))

    def clear(self) -> None:
        """Owe nothing."""
        self._u.zero_()
        self._v.zero_()

    @staticmethod
    def _rows_at_once(grad: Tensor) -> int:
        if grad.device.type != "cpu":
            return grad.shape[0]
        return max(1, _CHUNK * grad.shape[0] // grad.numel())


def _fitting(key: str, found: Tensor, mine: Tensor) -> Tensor:
    if found.numel() != mine.numel():
        sizes = f"{found.numel()} entries saved and {mine.numel()} here"
        raise CheckpointError(f"'{key}' of the compression state has {sizes}; load it into the model it was saved from")
    return found.to(mine.device).reshape(-1)


@torch.no_grad()
def apply_sparse(
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    counts: Sequence[int],
    indices: Tensor,
    values: Tensor,
    alphas: Sequence[float],
) -> None:
    """Add what every rank selected, times its alpha, to every parameter.

    ``indices`` and ``values`` have one row a rank; ``offsets`` and ``counts`` are the compressor's. Equal inputs give
    equal bits everywhere: a row names no entry twice, and rows are added in order, so that atomic additions on a GPU
    have nothing to race for. Nothing as large as a parameter is made on the way.
    """
    begin = 0
    for parameter, offset, count, alpha in zip(parameters, offsets, counts, alphas, strict=True):
        end = begin + count
        memory, places = _in_memory(parameter, indices[:, begin:end] - offset)
        if parameter.dtype in _SHORT:
            _add_rounding_once(memory, places, values[:, begin:end].float(), alpha)
        else:
            for row, change in zip(places, values[:, begin:end].to(parameter.dtype), strict=True):
                memory.index_add_(0, row, change, alpha=alpha)
        begin = end


def _in_memory(parameter: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """The parameter's memory as a flat view, and where in it the given entries (numbered row-major) lie."""
    if parameter.is_contiguous():
        return parameter.view(-1), entries
    places, rest, last = torch.zeros_like(entries, dtype=torch.int64), entries, 0
    for size, stride in zip(reversed(parameter.shape), reversed(parameter.stride()), strict=True):
        places.add_(rest % size, alpha=stride)
        rest = rest // size
        last += (size - 1) * stride
    return parameter.as_strided((last + 1,), (1,)), places


def _add_rounding_once(memory: Tensor, places: Tensor, values: Tensor, alpha: float) -> None:
    """``memory[places] += alpha * values`` in 16 bits, the sum over ranks taken in fp32 first.

    Adding rank by rank would round, and lose small changes, at every rank. Here equal places get a common slot, the
    slots sum up, and every place is written as often as it was named, each time the same number. Sorting instead of
    counting distinct places keeps the host from waiting for a GPU.
    """
    places = places.long()
    ordered, order = places.flatten().sort(stable=True)
    slots = torch.zeros_like(order)
    slots[order[1:]] = (ordered[1:] != ordered[:-1]).cumsum(0)
    slots = slots.view(places.shape)
    sums = torch.zeros(slots.numel(), dtype=torch.float32, device=values.device)
    for slot, value in zip(slots, values, strict=True):
        sums.index_add_(0, slot, value)
    memory[places] = (memory[places].float() + alpha * sums[slots]).to(memory.dtype)
