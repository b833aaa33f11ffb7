"""Whether a captured pass does what the pass does as it is written, tried on real batches before it may take its place.

What neither signature nor readings can see, a table that is filled step by step or memory of the host that is gone,
shows here: a step runs both ways, from the same buffers and random numbers, and loss, gradients and buffers are
compared. What was written is what counts; of the other way nothing stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.fastpath.cuda_graph_capture import Backward, CapturedStep, Run, generator_of

PROVED = 2  #: steps
#: Of norms. Sums in another order differ by less than 1 % in 16 bits; a program that is another one differs by more.
TOLERANCE = 0.02


class GraphValidation:
    """Steps that run both ways. ``weight``: what the loss was last multiplied by for backward."""

    def __init__(self, model: nn.Module, captured: CapturedStep, weight: Tensor | float) -> None:
        self.captured, self._weight = captured, weight
        self._model, self._parameters = model, list(model.parameters())
        self._apart: list[dict[str, Tensor]] = []

    @property
    def is_over(self) -> bool:
        return len(self._apart) == PROVED

    def objection(self) -> str | None:
        """What came out differently; waits for the device."""
        for step in self._apart:
            for what, apart in step.items():
                if float(apart) > TOLERANCE:
                    return f"{what} of a captured step differ by {float(apart):.1%} from those of the step as written"
        return None

    def run(self, batch: Any, plain: Run) -> tuple[Tensor, Backward]:
        """The replay goes first, since after the step as written it may find in memory what that left there."""
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
    """What a pass changes besides gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._generator = generator_of(device)
        self._random = self._generator.get_state()

    def restore(self) -> None:
        for name, buffer in self._model.named_buffers():
            kept = self._buffers.get(name)
            # one that the pass has made, or made longer, is a table; one that is expanded cannot be written to
            if kept is not None and kept.shape == buffer.shape and not _is_expanded(buffer):
                buffer.copy_(kept)
        self._generator.set_state(self._random)


def apart(these: Sequence[Tensor], those: Sequence[Tensor]) -> Tensor:
    """How far the worst pair of tensors is apart, as a part of its norm; next to nothing counts for a hundredth of all.
    Nought where numbers overflowed: such a step tells nothing."""
    pairs = [(one, other) for one, other in zip(these, those, strict=True) if one.numel()]
    if not pairs:
        return torch.zeros(())
    device = pairs[0][0].device  # buffers may lie on the host
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
    """Gradients that one of them has, with noughts where the other has none."""
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
