"""State of deep gradient compression on one rank: accumulates gradients, selects the entries to send, applies them.

Lin et al., "Deep Gradient Compression", ICLR 2018. A gradient is added to a momentum ``u``, and ``u`` is added to the
unsent residual ``v``. The largest entries of ``v`` are sent, and ``u`` and ``v`` are set to zero at these entries
(factor masking).

These invariants hold for each entry after any number of steps with gradients g:

    sent + v = sum of all that was ever added to v               and, with D the momentum that masking discarded,
    (1 - momentum) * (sent + v) + momentum * (u + D) = sum of g

The second one holds for plain and for Nesterov momentum; without momentum both reduce to ``sent + v = sum of g``.

Entries of all compressed parameters are numbered in one fused index space, row-major within a parameter whatever its
memory layout, so that ranks agree on the indices and checkpoints do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate as running_sum

import torch
from torch import Tensor

from echelon.base.errors import CheckpointError, UsageError
from echelon.parallel.data.topk import largest

_CHUNK = 1 << 17  # entries processed at a time on a CPU, so that temporaries stay in the cache
_SHORT = (torch.float16, torch.bfloat16)


def schedule_sparsity(step: int, begin: int, rampup_step: int, sparsities: Sequence[float]) -> float | None:
    """Return the sparsity of ``step``, or ``None`` (dense) before ``begin``.

    The schedule goes through ``sparsities`` evenly in ``rampup_step`` steps and then keeps the last one.
    """
    if rampup_step < 1 or not sparsities:
        found = f"rampup_step={rampup_step} and {len(sparsities)} sparsities"
        raise UsageError(f"a sparsity schedule was given {found}; give at least one step and one sparsity")
    if step < begin:
        return None
    return sparsities[min((step - begin) * len(sparsities) // rampup_step, len(sparsities) - 1)]


def count_sent_entries(size: int, sparsity: float) -> int:
    """Return how many of ``size`` entries are sent: at least one."""
    if not 0.0 <= sparsity <= 1.0:
        raise UsageError(f"the sparsity is {sparsity}; it is the share of entries held back, from 0 to 1")
    return max(1, round(size * (1.0 - sparsity)))


class Compressor:
    """The momentum and the unsent gradient of one rank, for all compressed parameters."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], device: torch.device | str) -> None:
        self.names, self.sizes = tuple(names), tuple(sizes)
        self.offsets = (0, *running_sum(sizes))[:-1]  #: first index of each parameter in the fused space
        total = sum(sizes)
        #: Type of the indices that are sent: 4 bytes each while that is enough.
        self.index_dtype = torch.int32 if total < 2**31 else torch.int64
        self._u, self._v = (torch.zeros(total, dtype=torch.float32, device=device) for _ in "uv")
        self._us, self._vs = torch.split(self._u, list(sizes)), torch.split(self._v, list(sizes))

    @torch.no_grad()
    def accumulate(self, index: int, grad: Tensor, momentum: float, nesterov: bool = False) -> None:
        """Add the gradient of parameter ``index``, which already includes weight decay and all scaling."""
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
        """Return the number of entries of each parameter that ``select`` returns: the same on every rank."""
        return [count_sent_entries(size, sparsity) for size in self.sizes]

    def count(self, sparsity: float) -> int:
        """Return the number of entries that ``select`` returns: the same on every rank."""
        return sum(self.counts(sparsity))

    @torch.no_grad()
    def select(self, sparsity: float, wire: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the entries to send, in parameter order: fused indices, and values in fp32 or the ``wire`` dtype.

        The part of a value that 16 bits cannot represent stays in ``v``: the rounding error, and the excess over the
        largest finite number of the wire dtype, to which values are clamped. ``v`` must be finite.
        """
        parts = zip(self._vs, self.counts(sparsity), self.offsets, strict=True)
        found = [largest(v, k).to(self.index_dtype).add_(offset) for v, k, offset in parts]
        indices = torch.cat(found) if found else torch.empty(0, dtype=self.index_dtype, device=self._v.device)
        values = self._v.index_select(0, indices)
        if wire is None or wire == torch.float32:
            self._clear_sent(indices, None)
            return indices, values
        bound = torch.finfo(wire).max
        sent = values.clamp(-bound, bound).to(wire)
        self._clear_sent(indices, values.sub_(sent))
        return indices, sent

    def _clear_sent(self, indices: Tensor, left: Tensor | None) -> None:
        """Clear the momentum of the sent entries, and set their residual to ``left`` (default zero)."""
        step = _CHUNK if indices.device.type == "cpu" else max(1, indices.numel())
        for start in range(0, indices.numel(), step):
            here = indices[start : start + step].long()  # index_fill_ accepts no other dtype
            self._u.index_fill_(0, here, 0.0)
            if left is None:
                self._v.index_fill_(0, here, 0.0)
            else:
                self._v.index_copy_(0, here, left[start : start + step])

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name, as flat views: ``u.<name>`` and ``v.<name>``."""
        parts = [(f"u.{name}", u) for name, u in zip(self.names, self._us, strict=True)]
        return dict(parts + [(f"v.{name}", v) for name, v in zip(self.names, self._vs, strict=True)])

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that ``tensors`` returned for the same parameters."""
        local = self.tensors()
        if odd := sorted(local.keys() ^ state.keys()):
            where = "is missing from" if odd[0] in local else "is only in"
            raise CheckpointError(
                f"'{odd[0]}' {where} the compression state; load one of the same compressed parameters"
            )
        for key, tensor in local.items():
            tensor.copy_(_fitting(key, state[key], tensor))

    @torch.no_grad()
    def add(self, name: str, u: Tensor, v: Tensor) -> None:
        """Add ``u`` and ``v`` to the state of parameter ``name``: this rank takes over the state of a removed rank."""
        local = self.tensors()
        for key, more in ((f"u.{name}", u), (f"v.{name}", v)):
            if key not in local:
                raise CheckpointError(f"'{name}' has a compression state but is not compressed here; compress it again")
            local[key].add_(_fitting(key, more, local[key]))

    def clear(self) -> None:
        """Set momentum and residual to zero."""
        self._u.zero_()
        self._v.zero_()

    @staticmethod
    def _rows_at_once(grad: Tensor) -> int:
        if grad.device.type != "cpu":
            return grad.shape[0]
        return max(1, _CHUNK * grad.shape[0] // grad.numel())


def _fitting(key: str, found: Tensor, local: Tensor) -> Tensor:
    if found.numel() != local.numel():
        sizes = f"{found.numel()} entries saved and {local.numel()} here"
        raise CheckpointError(f"'{key}' of the compression state has {sizes}; load it into the model it was saved from")
    return found.to(local.device).reshape(-1)


@torch.no_grad()
def apply_sparse(
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    counts: Sequence[int],
    indices: Tensor,
    values: Tensor,
    alphas: Sequence[float],
) -> None:
    """Add the entries that all ranks selected, times the parameter's alpha, to every parameter.

    ``indices`` and ``values`` have one row per rank; ``offsets`` and ``counts`` are the compressor's. Equal inputs give
    bitwise equal results on every rank: a row contains no index twice, and rows are added in order, so that atomic
    additions on a GPU cannot race. No temporary is as large as a parameter.
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
    """Return a flat view of the parameter's memory, and the positions in it of ``entries`` (numbered row-major)."""
    if parameter.is_contiguous():
        return parameter.view(-1), entries
    places, rest, last = torch.zeros_like(entries, dtype=torch.int64), entries, 0
    for size, stride in zip(reversed(parameter.shape), reversed(parameter.stride()), strict=True):
        places.add_(rest % size, alpha=stride)
        rest = rest // size
        last += (size - 1) * stride
    return parameter.as_strided((last + 1,), (1,)), places


def _add_rounding_once(memory: Tensor, places: Tensor, values: Tensor, alpha: float) -> None:
    """Compute ``memory[places] += alpha * values`` in 16 bits, with the sum over ranks taken in fp32 first.

    Adding rank by rank would round, and lose small changes, at every rank. Here equal places share a slot, each slot
    is summed, and a place that occurs several times is written several times with the same number. Sorting is used
    instead of counting distinct places because the count would make the host wait for a GPU.
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
