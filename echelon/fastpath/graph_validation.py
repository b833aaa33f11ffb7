"""Validates a captured pass against the eager pass on real batches, before it is used.

This finds problems that neither StepSignature nor PythonGuards can see, such as a table that is filled step by step or
host memory that has been freed. A step runs both ways, from the same buffers and random numbers, and loss, gradients
and buffers are compared. Only the results of the eager pass are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.fastpath.cuda_graph_capture import Backward, CapturedStep, Run, generator_of

PROVED = 2  #: number of validated steps
#: Relative difference of norms. Sums in another order differ by less than 1 % in 16 bits; a wrong program by more.
TOLERANCE = 0.02


class GraphValidation:
    """Runs steps both ways and compares them.

    weight: last weight of the loss in backward
    """

    def __init__(self, model: nn.Module, captured: CapturedStep, weight: Tensor | float) -> None:
        self.captured, self._weight = captured, weight
        self._model, self._parameters = model, list(model.parameters())
        self._apart: list[dict[str, Tensor]] = []

    @property
    def is_over(self) -> bool:
        return len(self._apart) == PROVED

    def objection(self) -> str | None:
        """Return what differs by more than the tolerance, or None; waits for the device."""
        for step in self._apart:
            for what, apart in step.items():
                if float(apart) > TOLERANCE:
                    return f"{what} of a captured step differ by {float(apart):.1%} from those of the step as written"
        return None

    def run(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        """Replay the captured pass, then run the eager one.

        The replay goes first, because after an eager step it could read results that the eager step left in memory.
        """
        before = PassSnapshot(self._model, self.captured.device)
        so_far = self._exchange([None] * len(self._parameters))
        self.captured.take(batch)
        self.captured.replay(self._weight)
        replayed = self._exchange(so_far)
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        before.restore()
        loss, inner = plain(batch)

        def backward(weight: Tensor | float) -> None:
            so_far = self._exchange([None] * len(self._parameters))
            inner(weight)
            written = self._exchange([None] * len(self._parameters))
            expected, found = _both(written, replayed)
            ratio = torch.as_tensor(weight) / torch.as_tensor(self._weight)
            self._apart.append(
                {
                    "losses": apart([loss.detach()], [self.captured.loss]),
                    "gradients": apart(expected, [gradient * ratio for gradient in found]),
                    "buffers": apart(list(self._model.buffers()), buffers),
                }
            )
            self._weight = weight
            self._exchange([_added(*both) for both in zip(so_far, written, strict=True)])

        return loss, backward

    def _exchange(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before


class PassSnapshot:
    """A snapshot of the state that a pass changes besides gradients: buffers and random state."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._generator = generator_of(device)
        self._random = self._generator.get_state()

    def restore(self) -> None:
        for name, buffer in self._model.named_buffers():
            kept = self._buffers.get(name)
            # A buffer that the pass has created or resized is a cached table; an expanded buffer cannot be written to.
            if kept is not None and kept.shape == buffer.shape and not _is_expanded(buffer):
                buffer.copy_(kept)
        self._generator.set_state(self._random)


def apart(these: Sequence[Tensor], those: Sequence[Tensor]) -> Tensor:
    """Return the largest relative difference of a pair of tensors; 1 % of the total norm is added to each norm.

    The result is 0 if ``these`` contain non-finite numbers, because an overflowed step proves nothing.
    """
    pairs = [(one, other) for one, other in zip(these, those, strict=True) if one.numel()]
    if not pairs:
        return torch.zeros(())
    device = pairs[0][0].device  # some buffers may be on the host
    norms = torch.stack([_exact(one).norm().to(device) for one, _ in pairs])
    differences = torch.stack([(_exact(one) - _exact(other)).norm().to(device) for one, other in pairs])
    worst = (differences / (norms + 0.01 * norms.norm() + 1e-12)).max()
    return torch.where(norms.isfinite().all(), worst, torch.zeros_like(worst)).nan_to_num(nan=torch.inf)


def _exact(numbers: Tensor) -> Tensor:
    return numbers.to(torch.complex128 if numbers.is_complex() else torch.float64)


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _both(written: Sequence[Tensor | None], replayed: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Return both lists of gradients without pairs of None, and with zeros in place of a single None."""
    pairs = [(one, other) for one, other in zip(written, replayed, strict=True) if one is not None or other is not None]
    return [_or_noughts(one, other) for one, other in pairs], [_or_noughts(other, one) for one, other in pairs]


def _or_noughts(one: Tensor | None, other: Tensor | None) -> Tensor:
    if one is not None:
        return one
    assert other is not None
    return torch.zeros_like(other)


def _added(so_far: Tensor | None, new: Tensor | None) -> Tensor | None:
    if so_far is None or new is None:
        return new if so_far is None else so_far
    return so_far.add_(new)
