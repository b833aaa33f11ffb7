"""Where the tensors of a rank's training state lie. Walking a model and its optimizers takes a millisecond or more, so
it is done once, and then only looked whether everything still is where it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.checkpoint.training_state import encode, optimizer_groups
from echelon.distributed.local_state import LocalState

if TYPE_CHECKING:
    from echelon.parallel.weight_average import EmaWeights


class StateSources:
    """``changing``: a strategy keeps tensors of its own, of which nothing is known here.
    ``average``: the run's moving average of weights, which may begin at any time; its tensors stay where they are.
    """

    def __init__(
        self,
        holdings: LocalState,
        optimizers: Mapping[str, torch.optim.Optimizer],
        changing: bool = False,
        average: Callable[[], EmaWeights | None] = lambda: None,
    ) -> None:
        self._holdings, self._optimizers, self._changing = holdings, optimizers, changing
        self._average, self._averages = average, average()
        self._parameters = [(value, value.data_ptr()) for value in holdings.parameters.values()]
        modules = holdings.model.modules()
        self._buffers = [(m._buffers, name, value) for m in modules for name, value in m._buffers.items()]
        names = holdings.names
        self._states = {
            key: [(names[id(p)], state) for p, state in optimizer.state.items()]
            for key, optimizer in optimizers.items()
        }
        found = [(key, name, state) for key, of in self._states.items() for name, state in of]
        self._sizes = [(state, len(state)) for _, _, state in found]
        self._fields = [(s, field, value) for _, _, s in found for field, value in s.items() if _is_tensor(value)]
        self._values = [(key, name, s, field) for key, name, s in found for field in s if not _is_tensor(s[field])]

    def unchanged(self) -> bool:
        """Plain loops: with 160 parameters they take half the time that generators do, and this is asked every step."""
        if self._changing or self._average() is not self._averages or not self._same_states():
            return False
        for parameter, at in self._parameters:
            if parameter.data_ptr() != at:
                return False
        for buffers, name, buffer in self._buffers:
            if buffers.get(name) is not buffer:
                return False
        for state, field, value in self._fields:  # noqa: SIM110 - see above
            if state.get(field) is not value:
                return False
        return True

    def _same_states(self) -> bool:
        for key, optimizer in self._optimizers.items():
            known = self._states[key]
            if len(known) != len(optimizer.state):
                return False
            for now, (_, state) in zip(optimizer.state.values(), known, strict=True):
                if now is not state:
                    return False
        return all(len(state) == size for state, size in self._sizes)

    def parameter_of(self, name: str) -> str | None:
        """Of a tensor ``optimizer.<optimizer>.<parameter>.<field>`` or ``ema.<parameter>``, the parameter."""
        if name.startswith("ema."):
            return name.removeprefix("ema.")
        for key in self._optimizers:
            if name.startswith(prefix := f"optimizer.{key}."):
                return name.removeprefix(prefix).rpartition(".")[0]
        return None

    def is_parameter(self, name: str) -> bool:
        return name in self._holdings.parameters

    def optimizers(self) -> dict[str, Any]:
        """What ``state.optimizer_state`` gives beside tensors."""
        facts: dict[str, Any] = {
            key: {"groups": optimizer_groups(self._holdings, key, optimizer), "values": {}}
            for key, optimizer in self._optimizers.items()
        }
        for key, name, state, field in self._values:
            facts[key]["values"].setdefault(name, {})[field] = encode(state[field])
        return facts


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
