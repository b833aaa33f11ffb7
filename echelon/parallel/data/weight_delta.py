"""Change of one bucket's parameters since the last sync of all replicas, for LocalSGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.activity import span
from echelon.distributed.replicas import flatten, unflatten_into
from echelon.parallel.data.all_reduce import sum_over


class WeightDelta:
    """A snapshot of one bucket's parameters and a flat buffer for their change; both are allocated once."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        wire: str | None,
        group: dist.ProcessGroup,
        number: int,
    ) -> None:
        self._names, self._parameters = names, parameters
        self._snapshot = flatten(parameters)
        self._change = torch.zeros_like(self._snapshot)
        what = f"bucket {number} ({span(names)})"
        self._sum = sum_over(self._change, wire, group, number=number, call="average of replicas", what=what)
        self._ranks = dist.get_world_size(group)

    @torch.no_grad()
    def start(self) -> None:
        """Start the sum of ``snapshot - parameters`` over all ranks."""
        places = zip(self._parameters, self._views(self._snapshot), self._views(self._change), strict=True)
        for parameter, was, change in places:
            torch.sub(was, parameter, out=change)
        self._sum.start()

    def turn(self) -> None:
        self._sum.turn()

    @torch.no_grad()
    def mean(self) -> Tensor:
        """Wait for the sum and return the mean change over all ranks."""
        self._sum.finish()
        return self._change.div_(self._ranks)

    @torch.no_grad()
    def go_on(self, change: Tensor) -> None:
        """Set the snapshot and the parameters to the snapshot minus ``change``."""
        unflatten_into(self._snapshot.sub_(change), self._parameters)

    @torch.no_grad()
    def show(self, change: Tensor) -> None:
        """Set the parameters to the snapshot minus ``change``, and keep the snapshot."""
        unflatten_into(self._snapshot - change, self._parameters)

    @torch.no_grad()
    def begin_here(self) -> None:
        """Set the snapshot to the parameters, which are now the same on all ranks."""
        self._snapshot.copy_(flatten(self._parameters))

    def snapshots(self) -> dict[str, Tensor]:
        """Return the snapshot by parameter name, as flat views."""
        return self.by_name(self._snapshot)

    def by_name(self, row: Tensor) -> dict[str, Tensor]:
        return {name: view.view(-1) for name, view in zip(self._names, self._views(row), strict=True)}

    def empty(self) -> Tensor:
        """Return a flat buffer of zeros for these parameters."""
        return torch.zeros_like(self._snapshot)

    def copy(self) -> Tensor:
        return flatten(self._parameters)

    @torch.no_grad()
    def put_back(self, copied: Tensor) -> None:
        unflatten_into(copied, self._parameters)

    def _views(self, row: Tensor) -> list[Tensor]:
        pieces = torch.split(row, [p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]
