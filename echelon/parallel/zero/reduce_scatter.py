"""Reduce-scatter of gradients in buckets, overlapped with backward: each rank receives the sum of its rows.

When backward has computed the last gradient of a bucket, the gradients are copied into a matrix with one line per rank,
the whole gradients are freed, and the matrix is reduce-scattered so that each rank gets its line. Each line has one
flag per parameter behind its rows, which is set if a rank used the parameter: a parameter that no rank used keeps
``grad = None``, as in one process. One more flag says that on some rank the bucket was incomplete until backward ended
(it holds an unused parameter). From the next pass on such buckets are sent last, because all later buckets would
otherwise keep their whole gradients until the end of backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.activity import span
from echelon.parallel.data.reducer import Passes, once
from echelon.parallel.zero.row_partition import RowMatrix, RowPartition
from echelon.parallel.zero.zero_collectives import Arrival, ShardCollectives

TAG = 1 << 20  # distinct from the tags of weights
UNDER_WAY = 2  # sums in flight at a time; each takes the memory of its bucket, twice that on Gloo


class ShardReducer:
    """Reduces the gradients of one optimizer like ``parallel.data.reducer.Reducer``, but into gradients of the shards.

    unhurried: True to wait during backward only when ``relieve`` is called
    """

    def __init__(self, buckets: Sequence[ShardBucket], unhurried: bool) -> None:
        self._buckets, self._unhurried = list(buckets), unhurried
        self._armed, self._learned = False, False
        self._sent: list[ShardBucket] = []  # buckets that are sent and not yet collected
        self._next = 0
        for bucket in self._buckets:
            bucket.watch(self)

    def arm(self, compressing: bool = False, passes: Passes = once) -> None:
        """Start sending completed buckets, whose sums are added to the gradients of the shards.

        passes: function from a parameter's name to the number of backward passes that make up its gradient
        """
        assert not compressing
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.reset(passes)

    def finish(self) -> None:
        """Send the remaining buckets and wait for all: then shards have gradients and whole parameters have none."""
        while self._next < len(self._buckets):
            self._send(late=not self._buckets[self._next].complete)
        self._armed = False
        self.relieve(0)
        for bucket in self._buckets:
            bucket.reset()
        if not self._learned:
            self._buckets.sort(key=lambda bucket: bucket.late)
            self._learned = True

    def completed(self) -> None:
        """Send the complete buckets that are next in order, after some bucket has its last gradient."""
        while self._armed and self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._send(late=False)
            if not self._unhurried:
                self.relieve()

    def relieve(self, remaining: int = UNDER_WAY) -> None:
        """Collect the oldest sums until at most ``remaining`` are in flight."""
        while len(self._sent) > remaining:
            self._sent.pop(0).collect(learn=not self._learned)

    def _send(self, late: bool) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.send(late)
        self._sent.append(bucket)


class ShardBucket:
    """Some parameters whose gradients are sent in one message."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, nn.Parameter],
        cuts: Mapping[str, RowPartition],
        exchange: ShardCollectives,
        number: int,
    ) -> None:
        self._names = names
        self._parameters = [parameters[name] for name in names]
        self._shards = [shards[name] for name in names]
        self._rows = RowMatrix([cuts[name] for name in names])
        self._exchange, self._tag = exchange, TAG + number
        self._what = f"bucket {number} ({span(names)})"
        self._arrival: Arrival | None = None
        self._missing: list[int] = []
        self._waiting: dict[int, int] = {}  # number of outstanding passes, by parameter
        self._is_sent = False
        self.late = False  #: True if the bucket was still incomplete on some rank when backward ended

    @property
    def complete(self) -> bool:
        return not self._waiting

    def watch(self, reducer: ShardReducer) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(self, reducer, index))  # type: ignore[no-untyped-call]

    def note(self, index: int) -> None:
        """Record that backward has computed this gradient."""
        if self._is_sent:
            raise UsageError(
                f"the gradient of '{self._names[index]}' changed after it was sent: one backward finished it "
                "twice; with torch.utils.checkpoint use use_reentrant=False"
            )
        left = self._waiting.pop(index, 1) - 1
        if left:
            self._waiting[index] = left

    def reset(self, passes: Passes = once) -> None:
        self._is_sent = False
        self._waiting = {i: passes(name) for i, name in enumerate(self._names)}

    @torch.no_grad()
    def send(self, late: bool) -> None:
        self._refuse_sparse()
        self._missing = [i for i, p in enumerate(self._parameters) if p.grad is None]
        self._arrival = self._exchange.sum_lines(self._filled(late), self._tag, self._what)
        for parameter in self._parameters:
            parameter.grad = None
        self._is_sent = True

    def collect(self, learn: bool) -> None:
        assert self._arrival is not None
        line, self._arrival = self._arrival(), None
        flags = line[self._rows.length :]
        unused = {i for i in self._missing if not flags[i]}  # parameters that this rank used need no flag
        if learn:
            self.late = bool(flags[-1])
        device = self._shards[0].device
        total = line[: self._rows.length].to(device)
        for i, grad in enumerate(self._rows.views(total, self._exchange.me)):
            if i not in unused:
                _accumulate(self._shards[i], grad)

    def _filled(self, late: bool) -> Tensor:
        first, flags = self._parameters[0], len(self._parameters) + 1
        grads = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        length = self._rows.length
        matrix = torch.zeros((self._exchange.ranks, length + flags), dtype=first.dtype, device=first.device)
        for rank, line in enumerate(matrix):
            places = self._rows.views(line[:length], rank)
            for i, grad in grads.items():
                places[i].copy_(self._rows.cuts[i].of(grad, rank))
        matrix[:, [length + i for i in grads]] = 1.0
        matrix[:, -1] = float(late)
        return matrix

    def _refuse_sparse(self) -> None:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"'{name}' has a sparse gradient, and shards are dense; use sparse=False in its layer")


def _accumulate(shard: nn.Parameter, grad: Tensor) -> None:
    if shard.grad is None:
        shard.grad = grad
    else:
        shard.grad.add_(grad)


def _hook(bucket: ShardBucket, reducer: ShardReducer, index: int) -> Callable[[Tensor], None]:
    """Return a hook with weak references: Python's garbage collector cannot see what torch's hooks refer to."""
    return functools.partial(_noted, weakref.ref(bucket), weakref.ref(reducer), index)


def _noted(bucket: weakref.ref[ShardBucket], reducer: weakref.ref[ShardReducer], index: int, _: Tensor) -> None:
    found, living = bucket(), reducer()
    if found is not None and living is not None:
        found.note(index)
        if found.complete:
            living.completed()
