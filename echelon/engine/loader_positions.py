"""``LoaderPositions``: the part of the training state that is known before the model is parallelized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from echelon.data import Loader
from echelon.engine.elastic import ElasticState
from echelon.engine.lr_schedules import AnyScheduler
from echelon.engine.overridden_values import UserHyperparameters

if TYPE_CHECKING:
    from echelon.checkpoint import Stored


class LoaderPositions:
    """The positions of the loaders, and the settings and batch sizes that training began with.

    Loaders are identified by the order in which they were created.

    elastic: ranks and batch sizes that training began with
    """

    def __init__(self, elastic: ElasticState, say: Callable[[str], None]) -> None:
        self._elastic, self._say = elastic, say
        self._loaders: list[Loader] = []
        self._states: list[dict[str, Any]] = []
        self._given = UserHyperparameters()

    def register(self, loader: Loader) -> None:
        """Save the position of this loader, too; restore it if a checkpoint was read before."""
        index = len(self._loaders)
        self._loaders.append(loader)
        if index < len(self._states):
            self._load(loader, self._states[index])
        self._given.compare_batch(index, loader, self._say)

    @property
    def count(self) -> int:
        """The number of training loaders."""
        return len(self._loaders)

    @property
    def only(self) -> Loader | None:
        """The training loader; None if there is none, or more than one."""
        return self._loaders[0] if len(self._loaders) == 1 else None

    def note_settings(
        self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Sequence[AnyScheduler]
    ) -> None:
        """Record the settings of optimizers and schedulers before the first step."""
        self._given.take(optimizers, schedulers)

    def states(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self._loaders]

    def facts(self) -> dict[str, Any]:
        """Return the facts for a checkpoint; all ranks have the same."""
        return {"elastic": self._elastic.facts(), "given": self._given.facts(self._loaders), "loaders": self.states()}

    def restore(self, stored: Stored, loaders: bool = True) -> None:
        """Restore settings and batch sizes, and with ``loaders`` the positions."""
        self._elastic.restore(stored.facts.get("elastic"))
        self._given.resume(stored.facts.get("given"))
        if loaders:
            self.place(stored.facts["loaders"])

    def place(self, states: list[dict[str, Any]]) -> None:
        """Restore the positions of the loaders, including loaders that are created later."""
        self._states = states
        for loader, state in zip(self._loaders, states, strict=False):
            self._load(loader, state)

    def _load(self, loader: Loader, state: dict[str, Any]) -> None:
        """Restore a position, and say if its data has changed; in the middle of an epoch the loader may refuse it."""
        loader.load_state_dict(state)
        if (change := loader.changed_data(state)) is not None:
            self._say(f"checkpoint: the data has changed: {change}; epoch {loader.epoch} goes on from batch "
                      f"{loader.position} with the new data")  # fmt: skip

    def overruled(self, stored: Stored) -> list[str]:
        """Return a log line for each setting that the checkpoint overrides."""
        return self._given.overruled(stored.facts.get("given"))
