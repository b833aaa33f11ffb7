"""``DelayedFiniteCheck``: gradients that are NaN or infinite, found without waiting for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from echelon.base.errors import EchelonError

#: Steps whose result may be unknown; then the host waits for the earliest.
_MOST = 4


class DelayedFiniteCheck:
    """The results of the last steps' checks, which arrive in host memory when the device comes to them.

    The update itself reads the result on the device and changes nothing where it is False. So nothing of such a
    gradient is applied, even if the error is raised some steps later.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[str, Tensor, torch.cuda.Event | None]] = deque()

    def note(self, grads: Tensor, words: str) -> Tensor:
        """Return, on the device, True if all gradients are finite.

        words: the error, if they are not
        """
        finite = torch.isfinite(torch.linalg.vector_norm(grads.detach(), ord=float("inf")))
        if finite.device.type != "cuda":
            self._pending.append((words, finite, None))
            return finite
        copy = torch.empty((), dtype=torch.bool, pin_memory=True)
        copy.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((words, copy, event))
        return finite

    def check(self, wait: bool = False) -> None:
        """Raise the first error among the results that are known, with ``wait`` among all."""
        while self._pending:
            words, finite, event = self._pending[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait and len(self._pending) <= _MOST:
                    return
                event.synchronize()
            self._pending.popleft()
            if not bool(finite):
                raise EchelonError(words)
