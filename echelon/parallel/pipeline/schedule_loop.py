"""Run a pipeline schedule: one rank performs its actions in order, and sends the tensors that other stages need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Literal, Protocol

from torch import Tensor

from echelon.base.errors import EchelonError
from echelon.distributed.activity import activity
from echelon.parallel.pipeline.comm_plan import CommPlan, ScheduledAction, StageMessage, StageTransfer
from echelon.parallel.pipeline.transport import PipelineExchange, PipelineLinks
from echelon.plan.schedule import Action

__all__ = ["StageExecutor", "StageTransfer", "run_schedule"]

Part = Literal["B", "I", "W"]


class StageExecutor(Protocol):
    """Runs one stage for one micro-batch."""

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        """Return the tensors that other stages need, by key.

        received:  tensors from other stages, as leaves; keys that were sent as None are missing
        """
        ...

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: Part
    ) -> Mapping[str, Tensor | None]:
        """Return the gradients of the received tensors, by key; a missing key or None stands for no gradient.

        gradients:  gradients of the tensors that forward returned and that want one; empty for W
        part:       B: all gradients; I: gradients of inputs; W: gradients of weights, and the result is empty
        """
        ...


def run_schedule(
    schedule: Sequence[Sequence[Action]],
    runner: StageExecutor,
    transfers: Sequence[StageTransfer],
    links: PipelineLinks,
    signature: Hashable | Callable[[int], Hashable],
) -> None:
    """Perform this rank's actions of ``schedule``.

    schedule:   actions of all ranks, from which the order of messages follows
    runner:     runs the stages of this rank
    transfers:  tensors that go from stage to stage
    links:      communication between the ranks of the pipeline
    signature:  key for the shapes of a micro-batch's inputs, equal on all ranks; a function of the micro-batch if they
                differ. For a new signature, shapes are sent in headers.

    An exception gets the rank, stage and micro-batch added, and is raised without waiting for other ranks.
    """
    found = links.route(schedule, transfers)
    of_micro = signature if callable(signature) else lambda micro: signature
    loop = _Loop(runner, found, PipelineExchange(links, found, of_micro))
    for scheduled in found.actions:
        try:
            loop.perform(scheduled)
        except Exception as error:
            stage, micro = scheduled.action.stage, scheduled.action.micro
            _name_the_place(error, f"rank {links.ranks[links.place]}, stage {stage}, micro-batch {micro}")
            raise
    loop.exchange.finish()


class _Loop:
    def __init__(self, runner: StageExecutor, route: CommPlan, exchange: PipelineExchange) -> None:
        self.exchange = exchange
        self._runner, self._route = runner, route
        self._handed: dict[StageMessage, list[Tensor | None]] = {}  # messages between stages of this rank
        self._wanted: dict[StageMessage, list[bool]] = {}  # for each of their tensors, True if it wants a gradient

    def perform(self, scheduled: ScheduledAction) -> None:
        since = monotonic() if activity.recorder is not None else 0.0
        self.exchange.expect(scheduled.soon)
        action = scheduled.action
        if action.kind == "F":
            self._forward(scheduled)
        elif action.kind == "W":
            self._runner.backward(action.stage, action.micro, {}, "W")
        else:
            self._backward(scheduled, action.kind)
        if activity.recorder is not None:
            activity.recorder.acted(action, since)

    def _forward(self, scheduled: ScheduledAction) -> None:
        received = {
            key: tensor
            for message in scheduled.needs
            for key, tensor in zip(self._keys(message), self._receive(message), strict=True)
            if tensor is not None
        }
        made = self._runner.forward(scheduled.action.stage, scheduled.action.micro, received)
        for message in scheduled.sends:
            self._send(message, [made[key] for key in self._keys(message)])

    def _backward(self, scheduled: ScheduledAction, part: Part) -> None:
        gradients: dict[str, Tensor | None] = {}
        for message in scheduled.needs:  # sorted by target, so that gradients are always summed in the same order
            wanted, received = self._wants(message), self._receive(message)
            for key, wants, gradient in zip(self._keys(message), wanted, received, strict=True):
                if wants:
                    gradients[key] = _sum(gradients.get(key), gradient)
        found = self._runner.backward(scheduled.action.stage, scheduled.action.micro, gradients, part)
        for message in scheduled.sends:
            pairs = zip(self._keys(message), self._wants(message), strict=True)
            self._send(message, [found.get(key) if wants else None for key, wants in pairs])

    def _keys(self, message: StageMessage) -> tuple[str, ...]:
        return self._route.keys[message.edge]

    def _wants(self, message: StageMessage) -> list[bool]:
        if self._route.is_local(message):
            return self._wanted[message._replace(backward=False)]
        return self.exchange.wants_gradients(message)

    def _receive(self, message: StageMessage) -> list[Tensor | None]:
        if self._route.is_local(message):
            return self._handed.pop(message)
        return self.exchange.receive_gradients(message) if message.backward else self.exchange.receive(message)

    def _send(self, message: StageMessage, tensors: list[Tensor | None]) -> None:
        if not self._route.is_local(message):
            (self.exchange.send_gradients if message.backward else self.exchange.send)(message, tensors)
        elif message.backward:
            self._handed[message] = tensors
        else:
            wanted = [tensor is not None and tensor.requires_grad and self._route.trains for tensor in tensors]
            self._wanted[message] = wanted
            self._handed[message] = [
                None if tensor is None else tensor.detach().requires_grad_(wants)
                for tensor, wants in zip(tensors, wanted, strict=True)
            ]


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def _name_the_place(error: Exception, place: str) -> None:
    if isinstance(error, EchelonError):
        error.args = (f"{place}: {error}", *error.args[1:])
    else:
        error.add_note(f"echelon: at {place}")
