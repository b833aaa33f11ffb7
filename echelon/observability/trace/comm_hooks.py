"""``CommHooks``: record the bytes and times of every collective and message while steps are traced.

During that time the methods of torch's ``ProcessGroup`` are wrapped, because all communication passes through them. At
all other times they are torch's own, without any cost.

A message takes its name from the wait for its completion: an all-reduce is the "sum of gradients" there. On Gloo its
end is the time that the backend reports; if the backend does not (messages between two ranks, tensors on a GPU), it is
the end of the wait. On NCCL the host does not know the end: there the message only gives its name and bytes to the
kernel that it launches.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from echelon.distributed.activity import activity, describe_ranks
from echelon.observability.trace.span import NETWORK, Span
from echelon.observability.trace.span_recorder import TraceRecorder, now

#: Methods, and the names of their messages before a wait names them. Older versions of torch lack some.
_CALLS = {
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv": "receive",
}


class CommRecord:
    """A collective or a message between two ranks, from its start to its completion."""

    def __init__(self, call: str, group: dist.ProcessGroup, args: tuple[Any, ...], step: int) -> None:
        self.name, self.step = _CALLS[call], step
        self.bytes = max((_bytes(arg) for arg in args), default=0)
        self.ranks, self.on_host = describe_ranks(group), dist.get_backend(group) != "nccl"
        self.begin, self.launched = now(), 0.0
        self.end: float | None = None
        self.reported = False  # True if the backend itself reported the completion
        self.waited: float | None = None
        self.of, self.at = _ends(call, group, args)
        self.number = 0  # ordinal among messages with the same ``of`` and ``at``

    @property
    def key(self) -> str:
        return f"{self.of}/{self.number}"

    def done(self, *, reported: bool = False) -> None:
        if self.end is None:
            self.end, self.reported = now(), reported

    def span(self) -> Span | None:
        if self.end is None:
            return None
        more: dict[str, Any] = {"key": self.key, **({"at": self.at} if self.at else {})}
        if self.reported:
            more["told"] = True
        if self.waited is not None:
            more["waited"] = min(max(self.waited, self.begin), self.end)
        return Span(self.name, "communicate", NETWORK, self.begin, self.end, self.step, self.bytes, self.ranks, more)


def _ends(call: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> tuple[str, str | None]:
    """Return a message identifier that is equal on all its ranks, and ``sender``, ``receiver`` or None for this end."""
    if call not in ("send", "recv"):
        return f"{group.group_name}/{call}", None
    me, peer, tag = group.rank(), args[1], args[2] if len(args) > 2 else 0
    source, target = (me, peer) if call == "send" else (peer, me)
    return f"{group.group_name}/{source}>{target}/{tag}", "sender" if call == "send" else "receiver"


class CommHooks:
    """Records the messages of all threads from ``open()`` to ``close()``. Incomplete messages are left out."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self.messages: list[CommRecord] = []
        self._numbers: Counter[tuple[str, str | None]] = Counter()
        self._lock = threading.Lock()
        self._originals: dict[str, Any] = {}

    def open(self) -> None:
        group = dist.ProcessGroup
        for call in _CALLS:
            if call in vars(group):
                self._originals[call] = vars(group)[call]  # getattr would unwrap the descriptor
                setattr(group, call, self._tapped(call, getattr(group, call)))

    def close(self) -> None:
        for call, original in self._originals.items():
            setattr(dist.ProcessGroup, call, original)
        self._originals = {}

    def _tapped(self, call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
            try:
                message = CommRecord(call, group, args, self._recorder.step)
            except (ValueError, KeyError, RuntimeError):  # torch.distributed does not know this group
                return original(group, *args, **named)
            with self._lock:
                self._numbers[message.of, message.at] += 1
                message.number = self._numbers[message.of, message.at]
                self.messages.append(message)
            work = original(group, *args, **named)
            message.launched = now()
            if work is None:
                message.done()
                return work
            here = threading.get_ident() == self._recorder.thread
            _ask_for_its_end(work, message, args)
            return TracedWork(work, message, here)

        return tapped


def _ask_for_its_end(work: Any, message: CommRecord, args: tuple[Any, ...]) -> None:
    """Register a callback for the completion of a message, if the backend supports it.

    It does not for messages between two ranks. For tensors on a GPU the callback would affect stream order.
    """
    if message.at is None and message.on_host and not any(map(_on_gpu, args)):
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(lambda _: message.done(reported=True))


class TracedWork:
    """Wraps a torch ``Work`` to record the first wait for it and the name of that wait."""

    def __init__(self, work: Any, message: CommRecord, here: bool) -> None:
        self._work, self._message, self._here = work, message, here

    def wait(self, *args: Any) -> Any:
        message = self._message
        if message.waited is None:
            message.waited = now()
            if self._here and activity.wait is not None:
                message.name = activity.wait.call
        result = self._work.wait(*args)
        if message.on_host:
            message.done()  # no effect if the backend has reported the completion before
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _on_gpu(arg: Any) -> bool:
    if isinstance(arg, Tensor):
        return arg.is_cuda
    return isinstance(arg, list | tuple) and any(map(_on_gpu, arg))


def _bytes(arg: Any) -> int:
    if isinstance(arg, Tensor):
        return arg.numel() * arg.element_size()
    return sum(_bytes(part) for part in arg) if isinstance(arg, list | tuple) else 0


def spans_of(messages: Iterable[CommRecord]) -> list[Span]:
    """Return the spans of completed messages of host backends (not NCCL)."""
    return [span for message in messages if message.on_host and (span := message.span()) is not None]
