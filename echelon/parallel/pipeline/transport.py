"""Send and receive the messages between the ranks of one pipeline, with their headers and buffers.

Only the wait for a message that is needed now blocks. On Gloo, messages are matched by tag, and receives are posted a
few actions ahead. NCCL matches messages by order alone, and a waiting message holds up those behind it; there all ranks
send and receive in one order (``CommPlan.order``), which cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import PendingCollective, json_to_tensor, tensor_to_json
from echelon.parallel.pipeline.comm_plan import CommPlan, StageMessage, StageTransfer, route
from echelon.parallel.pipeline.message_packing import (
    Form,
    alone,
    form_of,
    from_json,
    gradients_form,
    pack,
    pack_gradients,
    packed_gradient,
    packed_gradients_size,
    packed_size,
    same_form,
    to_json,
    unpack,
    unpack_gradients,
)
from echelon.plan.schedule import Action
from echelon.plan.simulate import Edge

Announced = dict[Edge, Form]  #: the form of messages on each edge

FRAME = 4096  # bytes of a header; a longer header continues in a second message
_LENGTH = 8  # bytes at the beginning of a header that hold its length


class PipelineLinks:
    """Point-to-point communication between the ranks of ONE pipeline: same replica, same index along the split axis."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        device: torch.device,
        backend: str,
        dynamic_shapes: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)  #: global ranks, in the order of the pipeline
        self.place = self.ranks.index(dist.get_rank()) if len(self.ranks) > 1 else 0
        self.device, self.dynamic_shapes = device, dynamic_shapes
        self.ordered = backend != "gloo"
        self.announced: dict[Hashable, Announced] = {}  #: known forms, by (signature of the batch, training)
        self._group = group if group is not None or len(self.ranks) == 1 else dist.group.WORLD
        self._places = (
            [dist.get_group_rank(self._group, rank) for rank in self.ranks] if self._group is not None else []
        )
        self._names = [str(rank) for rank in self.ranks]
        self._known: tuple[Any, Any, CommPlan] | None = None
        self._on_host = backend == "gloo"
        self._staged = self._on_host and device.type != "cpu"
        self.plain = device.type == "cpu"  #: a single tensor may be sent and received without packing

    def route(self, schedule: Sequence[Sequence[Action]], transfers: Sequence[StageTransfer]) -> CommPlan:
        """Return this rank's CommPlan. It is found by identity if all arguments are the tuples of the last step."""
        if self._known is None or self._known[0] is not schedule or self._known[1] is not transfers:
            result = route(tuple(map(tuple, schedule)), tuple(transfers), self.place)
            if not (isinstance(schedule, tuple) and isinstance(transfers, tuple)):  # mutable: identity is not enough
                return result
            self._known = schedule, transfers, result
        return self._known[2]

    def name(self, place: int) -> str:
        """Return the global rank at a place of the pipeline, as text."""
        return self._names[place]

    def buffer(self, size: int) -> Tensor:
        """Return a buffer of bytes to pack a message into, or to receive one."""
        if self._staged:  # torch caches freed pinned memory, and does not reuse it before its copies are done
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device="cpu" if self._on_host else self.device)

    def send(self, buffer: Tensor, place: int, tag: int) -> PendingCollective:
        if self._staged:
            torch.cuda.current_stream(self.device).synchronize()
        assert self._group is not None
        # isend() and irecv() do the same, but take 8 microseconds to look up groups and ranks.
        return self._group.send([buffer], self._places[place], 0 if self.ordered else tag)

    def receive(self, buffer: Tensor, place: int, tag: int) -> PendingReceive:
        assert self._group is not None
        return PendingReceive(self._group.recv([buffer], self._places[place], 0 if self.ordered else tag), buffer)

    def to_device(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.device, non_blocking=True)


class PendingReceive(NamedTuple):
    """A receive that has been posted, and its buffer."""

    work: PendingCollective
    buffer: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer


class _PendingSend(NamedTuple):
    message: StageMessage
    work: PendingCollective
    buffer: Tensor  # must stay alive until the work is done


class PipelineExchange:
    """Sends and receives the messages of one run of a schedule."""

    def __init__(self, links: PipelineLinks, route: CommPlan, signature: Callable[[int], Hashable]) -> None:
        self._links, self._route, self._signature = links, route, signature
        self._announced: dict[int, Announced] = {}  # by micro-batch
        self._forms: dict[tuple[Edge, int], Form] = {}  # of messages sent or expected, by edge and micro-batch
        self._to_send = deque(route.outgoing)
        self._to_receive = defaultdict[Hashable, deque[StageMessage]](deque)
        for message in route.incoming:
            self._to_receive[self._lane(message)].append(message)
        self._headers: dict[StageMessage, PendingReceive] = {}
        self._arriving: dict[StageMessage, PendingReceive | None] = {}  # None: the message is empty and is not sent
        self._sent = defaultdict[int, list[_PendingSend]](list)

    # ---- sending ----

    def send(self, message: StageMessage, tensors: Sequence[Tensor | None]) -> None:
        self._take_turn(message)
        form = self._announce(message, tensors)
        if size := packed_size(form):
            self._dispatch(message, self._packed(tensors, form, size), header=False)

    def _packed(self, tensors: Sequence[Tensor | None], form: Form, size: int) -> Tensor:
        """Return the tensors as one buffer. It is a copy, because a stage may write to its outputs again."""
        if self._links.plain and alone(form) and tensors[0] is not None:
            return tensors[0].detach().clone(memory_format=torch.contiguous_format)
        buffer = self._links.buffer(size)
        pack(tensors, form, buffer)
        return buffer

    def send_gradients(self, message: StageMessage, gradients: Sequence[Tensor | None]) -> None:
        self._take_turn(message)
        form = self._forms[message.edge, message.micro]
        if size := packed_gradients_size(form):
            buffer = packed_gradient(gradients, form) if self._links.plain else None
            if buffer is None:
                buffer = self._links.buffer(size)
                pack_gradients(gradients, form, buffer)
            self._dispatch(message, buffer, header=False)

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for sent in [sent for all_sent in self._sent.values() for sent in all_sent]:
            receiver = self._links.name(self._route.receiver(sent.message))
            with waiting("completion of sends", sent.message, receiver):
                sent.work.wait()
        self._sent.clear()

    def _take_turn(self, message: StageMessage) -> None:
        expected = self._to_send.popleft()
        assert expected == message, f"{message} would be sent before {expected}"
        if self._links.ordered:
            queue = self._to_receive[self._lane(message)]
            while queue and self._route.order[queue[0]] < self._route.order[message]:
                self._begin_next(queue)

    def _announce(self, message: StageMessage, tensors: Sequence[Tensor | None]) -> Form:
        """Return the form of a message, and send it as a header unless the receiver knows it.

        Raises UsageError if the form differs from the known one.
        """
        form = form_of(tensors, training=self._route.trains)
        known = self._known_form(message)
        if known is None:
            self._send_header(message, form)
            self._all_announced(message)[message.edge] = form
        elif not same_form(form, known):
            raise _differs(message, self._route.keys[message.edge], form, known)
        self._forms[message.edge, message.micro] = known or form
        return known or form

    def _send_header(self, message: StageMessage, form: Form) -> None:
        text = json_to_tensor(to_json(form))
        length = torch.tensor([text.numel()]).view(torch.uint8)
        framed = torch.zeros(max(FRAME, _LENGTH + text.numel()), dtype=torch.uint8)
        framed[: _LENGTH + text.numel()] = torch.cat([length, text])
        for part in (framed[:FRAME], framed[FRAME:]) if len(framed) > FRAME else (framed,):
            buffer = self._links.buffer(len(part))
            buffer.copy_(part)
            self._dispatch(message, buffer, header=True)

    def _dispatch(self, message: StageMessage, buffer: Tensor, *, header: bool) -> None:
        receiver = self._route.receiver(message)
        work = self._links.send(buffer, receiver, self._route.tag(message, header=header))
        self._sent[receiver].append(_PendingSend(message, work, buffer))

    def _release_sends(self, arrived: StageMessage) -> None:
        """Release sends that the sender of ``arrived`` must have received before it sent that message."""
        peer, done = self._route.sender(arrived), self._route.sent_at[arrived]
        still = []
        for sent in self._sent[peer]:
            if self._route.needed_at[sent.message] <= done:
                sent.work.wait()
            else:
                still.append(sent)
        self._sent[peer] = still

    # ---- receiving ----

    def receive(self, message: StageMessage) -> list[Tensor | None]:
        """Wait for the tensors of another stage, and return them on the device as leaves of a new autograd graph."""
        buffer = self._wait(message)
        form = self._forms[message.edge, message.micro]
        if buffer is not None and self._links.plain and (field := alone(form)) is not None:
            return [buffer.requires_grad_(field.wants_gradient)]
        return unpack(self._links.to_device(self._links.buffer(0) if buffer is None else buffer), form)

    def receive_gradients(self, message: StageMessage) -> list[Tensor | None]:
        buffer = self._wait(message)
        form = self._forms[message.edge, message.micro]
        if buffer is None:
            return [None] * len(form)
        present = buffer[: len(form)].tolist()
        return unpack_gradients(self._links.to_device(buffer), form, present)

    def wants_gradients(self, message: StageMessage) -> list[bool]:
        """Return, for each tensor on this edge, True if it wants a gradient."""
        return [field is not None for field in gradients_form(self._forms[message.edge, message.micro])]

    def expect(self, messages: Iterable[StageMessage]) -> None:
        """Post the receives of these messages, if their forms are known, so that they overlap with computation."""
        for message in messages:
            if message not in self._arriving:
                queue = self._to_receive[self._lane(message)]
                while message not in self._arriving and self._may_begin(queue[0]):
                    self._begin_next(queue)

    def _wait(self, message: StageMessage) -> Tensor | None:
        queue = self._to_receive[self._lane(message)]
        while message not in self._arriving:
            self._begin_next(queue)
        arrival = self._arriving.pop(message)
        if arrival is None:
            return None
        with waiting(_receiving(message), message, self._links.name(self._route.sender(message))):
            buffer = arrival.wait()
        self._release_sends(message)
        return buffer

    def _may_begin(self, message: StageMessage) -> bool:
        """Return True if the receive can be posted without waiting for a header.

        In ordered mode it must also not overtake a message that this rank has to send first.
        """
        if self._links.ordered and self._to_send and self._route.order[self._to_send[0]] < self._route.order[message]:
            return False
        if self._form(message) is None and not message.backward:
            self._begin_header(message)
        return self._form(message) is not None

    def _begin_next(self, queue: deque[StageMessage]) -> None:
        message = queue.popleft()
        form = self._form(message) or self._read_header(message)
        self._forms[message.edge, message.micro] = form
        size = packed_gradients_size(form) if message.backward else packed_size(form)
        if not size:
            self._arriving[message] = None
        elif self._links.plain and not message.backward and (field := alone(form)) is not None:
            self._arriving[message] = self._begin(message, torch.empty(field.shape, dtype=field.dtype), header=False)
        else:
            self._arriving[message] = self._begin(message, self._links.buffer(size), header=False)

    def _begin(self, message: StageMessage, buffer: Tensor, *, header: bool) -> PendingReceive:
        return self._links.receive(buffer, self._route.sender(message), self._route.tag(message, header=header))

    def _begin_header(self, message: StageMessage) -> None:
        if message not in self._headers:
            self._headers[message] = self._begin(message, self._links.buffer(FRAME), header=True)

    def _read_header(self, message: StageMessage) -> Form:
        assert not message.backward, f"{message} cannot come before its activation"
        self._begin_header(message)
        with waiting(_receiving(message), message, self._links.name(self._route.sender(message))):
            frame = self._headers.pop(message).wait().cpu()
        length = int(frame[:_LENGTH].view(torch.int64))
        text = frame[_LENGTH : _LENGTH + length]
        if _LENGTH + length > FRAME:
            rest = self._begin(message, self._links.buffer(_LENGTH + length - FRAME), header=True).wait().cpu()
            text = torch.cat([text, rest])
        form = from_json(tensor_to_json(text))
        self._all_announced(message)[message.edge] = form
        return form

    # ---- known forms ----

    def _form(self, message: StageMessage) -> Form | None:
        result = self._forms.get((message.edge, message.micro))
        return result if result is not None or message.backward else self._known_form(message)

    def _known_form(self, message: StageMessage) -> Form | None:
        return None if self._links.dynamic_shapes else self._all_announced(message).get(message.edge)

    def _all_announced(self, message: StageMessage) -> Announced:
        result = self._announced.get(message.micro)
        if result is None:
            batch = self._signature(message.micro), self._route.trains
            result = self._announced[message.micro] = self._links.announced.setdefault(batch, {})
        return result

    def _lane(self, message: StageMessage) -> Hashable:
        """Return the key of messages whose receives must be posted in order: a header gives the form of later ones."""
        return None if self._links.ordered else (message.edge, message.backward)


def _receiving(message: StageMessage) -> str:
    return "receive gradients" if message.backward else "receive activations"


def _differs(message: StageMessage, keys: Sequence[str], form: Form, known: Form) -> UsageError:
    key, now, before = next(
        (key, now, before)
        for key, now, before in zip(keys, form, known, strict=True)
        if not same_form((now,), (before,))
    )
    return UsageError(
        f"pipeline: '{key}' goes from stage {message.source} to stage {message.target} as {now}, but for a batch of "
        f"this shape it was {before} before; use pipeline(dynamic_shapes=True)"
    )
