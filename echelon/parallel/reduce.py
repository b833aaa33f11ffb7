"""Reducing gradients over replicas, in buckets, while backward still runs.

Autograd tells us when each parameter's gradient is complete. When a bucket's last one is, the bucket's
gradients are scaled into one flat buffer (a single pass: the copy and the division are one kernel) and the
buffer is all-reduced in the background. Afterwards ``parameter.grad`` is a view of the buffer, so nothing is
copied back. Buckets leave in the plan's order on every rank, whatever order backward finishes them in.

A parameter that no rank used keeps ``grad = None``, as in one process: a zero instead would let weight decay and
momentum move it. Each bucket therefore carries one flag a parameter behind the gradients: who used me?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.parallel.sparse import reduce_sparse
from echelon.plan import Bucket, Plan

WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Reducer:
    """Reduces the gradients of the plan's buckets that belong to one optimizer."""

    def __init__(
        self,
        plan: Plan,
        optimizer: str,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        wire = WIRE[plan.wire] if plan.wire else None
        mine = [bucket for bucket in plan.buckets if bucket.optimizer == optimizer]
        self._dense = [_DenseBucket(b, parameters, wire) for b in mine if not b.sparse]
        self._sparse = [(b.parameters[0], parameters[b.parameters[0]]) for b in mine if b.sparse]
        self._groups = groups
        self._armed = False
        self._next = 0
        self._factor: Callable[[], Tensor | float] = lambda: 1.0
        for bucket in self._dense:
            bucket.watch(self._on_complete)

    def arm(self, factor: Callable[[], Tensor | float]) -> None:
        """From now on a completed bucket is sent. ``factor`` gives what to scale by; it is asked when first needed."""
        self._armed, self._next, self._factor = True, 0, factor
        for bucket in self._dense:
            bucket.reset()

    def finish(self) -> None:
        """Send what is left, wait for everything, and leave every parameter with its reduced gradient."""
        self._send(everything=True)
        self._armed = False
        for bucket in self._dense:
            bucket.collect()
        for name, parameter in self._sparse:
            parameter.grad = reduce_sparse(name, parameter, self._factor(), self._groups[0])

    def _on_complete(self) -> None:
        if self._armed:
            self._send()

    def _send(self, everything: bool = False) -> None:
        while self._next < len(self._dense) and (everything or self._dense[self._next].complete):
            group = self._groups[self._next % len(self._groups)]
            self._dense[self._next].send(self._factor(), group)
            self._next += 1


class _DenseBucket:
    """Some parameters, the flat buffer their gradients travel in, and the flat buffer they live in afterwards."""

    def __init__(self, bucket: Bucket, parameters: Mapping[str, nn.Parameter], wire: torch.dtype | None) -> None:
        self.names = bucket.parameters
        self.parameters = [parameters[name] for name in bucket.parameters]
        self._size = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self._sent = torch.zeros(self._size + len(self.parameters), dtype=wire or first.dtype, device=first.device)
        self._home = torch.zeros(self._size, dtype=first.dtype, device=first.device) if wire else self._sent
        self._outbox = _views(self._sent, self.parameters)
        self._slots = _views(self._home, self.parameters) if wire else self._outbox
        self._work: dist.Work | None = None
        self._missing: list[int] = []
        self._waiting = set(range(len(self.parameters)))

    @property
    def complete(self) -> bool:
        return not self._waiting

    def watch(self, on_complete: Callable[[], None]) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index, on_complete)
            )

    def _hook(self, index: int, on_complete: Callable[[], None]) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self._work is not None:
                raise UsageError(
                    f"the gradient of '{self.names[index]}' changed after it was sent: one backward finished it "
                    "twice; with torch.utils.checkpoint use use_reentrant=False"
                )
            self._waiting.discard(index)
            if not self._waiting:
                on_complete()

        return hook

    def reset(self) -> None:
        self._work = None
        self._waiting = set(range(len(self.parameters)))

    @torch.no_grad()
    def send(self, factor: Tensor | float, group: dist.ProcessGroup) -> None:
        self._missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        outbox = [slot for i, slot in enumerate(self._outbox) if i not in self._missing]
        self._refuse_sparse()
        if self._sent.is_cuda:
            torch._foreach_copy_(outbox, grads)
            self._sent[: self._size].mul_(factor)
        else:
            for slot, grad in zip(outbox, grads, strict=True):
                torch.mul(grad, factor, out=slot)
        self._sent[self._size :] = 1
        for i in self._missing:
            self._outbox[i].zero_()
            self._sent[self._size + i] = 0
        for parameter, slot in zip(self.parameters, self._slots, strict=True):
            parameter.grad = slot  # the gradient autograd made is free from here on
        self._work = dist.all_reduce(self._sent, group=group, async_op=True)

    def collect(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._home is not self._sent:
            self._home.copy_(self._sent[: self._size])
        if self._missing:
            used = self._sent[self._size :].tolist()
            for i in self._missing:
                if not used[i]:
                    self.parameters[i].grad = None

    def _refuse_sparse(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"'{name}' has a sparse gradient, but it is not the weight of an Embedding or EmbeddingBag with "
                    "sparse=True; use one of those, or sparse=False"
                )


def _views(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """One view of ``flat`` a parameter, laid out in memory as the parameter is (channels-last stays so)."""
    views, offset = [], 0
    for p in parameters:
        end = offset + p.numel()
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        views.append(flat[offset:end].as_strided(p.shape, p.stride()) if dense else flat[offset:end].view(p.shape))
        offset = end
    return views
