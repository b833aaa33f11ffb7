"""Gradients to the ranks that hold the rows: summed over replicas bucket by bucket, while backward still runs.

When backward has made the last gradient of a bucket, its rows are put into a matrix with one line a rank, the whole
gradients are freed, and the matrix is summed so that each rank gets its line. Behind the rows of every line there is a
flag for each parameter, "somebody used me": one that nobody used keeps ``grad = None``, as in one process. One more
flag says that some rank had to wait for the bucket until backward was over (it holds a parameter that is not used):
from the next pass on such buckets go last, or all others would wait behind them with their whole gradients.
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

TAG = 1 << 20  # apart from those of weights
UNDER_WAY = 2  # sums at a time; each has the size of its bucket, twice on Gloo


class ShardReducer:
    """The gradients of one optimizer. As ``parallel.reduce.Reducer``, but what it leaves are the shards' gradients.

    ``unhurried``: never wait while backward runs, except when ``relieve`` is called.
    """

    def __init__(self, buckets: Sequence[ShardBucket], unhurried: bool) -> None:
        self._buckets, self._unhurried = list(buckets), unhurried
        self._armed, self._learned = False, False
        self._sent: list[ShardBucket] = []  # and not collected yet
        self._next = 0
        for bucket in self._buckets:
            bucket.watch(self)

    def arm(self, compressing: bool = False, passes: Passes = once) -> None:
        """From now on a completed bucket is sent, and adds to what the shards have.

        ``passes`` says how many backward passes make up each parameter's gradient.
        """
        assert not compressing
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.reset(passes)

    def finish(self) -> None:
        """Send what is left and wait for everything: every shard has its gradient, no parameter has."""
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
        """Some bucket has its last gradient."""
        while self._armed and self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._send(late=False)
            if not self._unhurried:
                self.relieve()

    def relieve(self, remaining: int = UNDER_WAY) -> None:
        """Collect what was sent first, so that no more than so many are under way."""
        while len(self._sent) > remaining:
            self._sent.pop(0).collect(learn=not self._learned)

    def _send(self, late: bool) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.send(late)
        self._sent.append(bucket)


class ShardBucket:
    """Some parameters whose gradients travel together."""

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
        self._waiting: dict[int, int] = {}  # passes to come, by parameter
        self._gone = False
        self.late = False  #: some rank did not have it complete before backward was over

    @property
    def complete(self) -> bool:
        return not self._waiting

    def watch(self, reducer: ShardReducer) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(self, reducer, index))  # type: ignore[no-untyped-call]

    def note(self, index: int) -> None:
        """Backward has made this gradient."""
        if self._gone:
            raise UsageError(
                f"the gradient of '{self._names[index]}' changed after it was sent: one backward finished it "
                "twice; with torch.utils.checkpoint use use_reentrant=False"
            )
        left = self._waiting.pop(index, 1) - 1
        if left:
            self._waiting[index] = left

    def reset(self, passes: Passes = once) -> None:
        self._gone = False
        self._waiting = {i: passes(name) for i, name in enumerate(self._names)}

    @torch.no_grad()
    def send(self, late: bool) -> None:
        self._refuse_sparse()
        self._missing = [i for i, p in enumerate(self._parameters) if p.grad is None]
        self._arrival = self._exchange.sum_lines(self._filled(late), self._tag, self._what)
        for parameter in self._parameters:
            parameter.grad = None
        self._gone = True

    def collect(self, learn: bool) -> None:
        assert self._arrival is not None
        line, self._arrival = self._arrival(), None
        flags = line[self._rows.length :]
        unused = {i for i in self._missing if not flags[i]}  # where this rank used it there is nothing to ask
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
    """Torch holds a hook, and what the hook holds, where Python's garbage collection does not look: hence weak."""
    return functools.partial(_noted, weakref.ref(bucket), weakref.ref(reducer), index)


def _noted(bucket: weakref.ref[ShardBucket], reducer: weakref.ref[ShardReducer], index: int, _: Tensor) -> None:
    found, living = bucket(), reducer()
    if found is not None and living is not None:
        found.note(index)
        if found.complete:
            living.completed()
