"""Exponential moving average of this rank's part of a model, whatever the layout.

Parameters that an optimizer steps are averaged locally: each rank of a split, stage or shard averages its own part, so
that no communication is needed. Parameters without an optimizer are not averaged, and neither are buffers, as with
``torch.optim.swa_utils.AveragedModel``, unless ``use_buffers`` is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.base.config import require, strict
from echelon.distributed.local_state import LocalState
from echelon.distributed.tensor_layout import Part, local_tensor

if TYPE_CHECKING:
    from echelon.checkpoint import Stored

#: Types that are averaged in fp32, because 0.001 of a small change would be rounded away in them.
NARROW = (torch.bfloat16, torch.float16)


@strict
class Ema:
    """Settings of a moving average.

    decay:       share of the average that an update keeps
    warmup:      smaller decays in the beginning: ``1 - (1 + n / gamma) ** -power`` after n updates, as in timm and
                 diffusers
    min_decay:   lower bound of the decay during the warm-up
    after:       updates in the beginning that only copy the weights
    use_buffers: True to average floating-point buffers too; default False, which takes their current values
    """

    decay: float = 0.999
    warmup: bool = False
    gamma: float = 1.0
    power: float = 2 / 3
    min_decay: float = 0.0
    after: int = 0
    use_buffers: bool = False

    def __post_init__(self) -> None:
        require(0.0 <= self.decay < 1.0, self, "decay", "0 or more, and less than 1")
        require(0.0 <= self.min_decay <= self.decay, self, "min_decay", "0 or more, and at most decay")
        require(self.gamma > 0.0, self, "gamma", "more than 0")
        require(self.power > 0.0, self, "power", "more than 0")
        require(self.after >= 0, self, "after", "0 or more")

    def decay_after(self, updates: int) -> float:
        """Return the decay of the next update; 0 copies the weights, as the first update does."""
        counted = updates - self.after
        if counted <= 0:
            return 0.0
        if not self.warmup:
            return self.decay
        warm: float = 1 - (1 + counted / self.gamma) ** -self.power
        return max(min(warm, self.decay), self.min_decay)


class EmaTensorGroup:
    """Tensors that are averaged together after each update of one optimizer (``None``: of any optimizer)."""

    def __init__(self, optimizer: str | None, live: Mapping[str, Tensor], exact: Callable[[str], Tensor]) -> None:
        self.optimizer, self.updates, self._exact = optimizer, 0, exact
        self.live = dict(live)
        self.average = {name: _copy(value) for name, value in live.items()}
        plain = [name for name, value in live.items() if value.dtype not in NARROW]
        self._narrow = [name for name, value in live.items() if value.dtype in NARROW]
        self._pairs = [self.average[name] for name in plain], [live[name] for name in plain]

    def update(self, decay: float) -> None:
        """Move the averages towards the weights."""
        averages, values = self._pairs
        if averages:
            _move(averages, values, decay)
        for name in self._narrow:  # one at a time, because each needs a copy in fp32
            _move([self.average[name]], [self._exact(name).to(torch.float32)], decay)
        self.updates += 1


class EmaWeights:
    """This rank's part of a moving average.

    exact: functions that return full-precision weights, by name, for parameters stored in less precision (low_memory)
    """

    def __init__(
        self, settings: Ema, local_state: LocalState, exact: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> None:
        self.settings, self._local_state = settings, local_state
        self._exact = exact or {}
        taken: set[str] = set()
        self._all: list[EmaTensorGroup] = []
        for key, groups in local_state.groups.items():
            names = [name for group in groups for name in group if name in local_state.parameters and name not in taken]
            taken |= set(names)
            live = {name: local_state.parameters[name] for name in names}
            self._all.append(EmaTensorGroup(key, _floating(live), self._weight))
        if settings.use_buffers:
            held = {name: local_tensor(value) for name, value in local_state.tensors().items()}
            buffers = {name: held[name] for name, _ in local_state.model.named_buffers() if name in held}
            self._all.append(EmaTensorGroup(None, _floating(buffers), self._weight))

    @torch.no_grad()
    def update(self, optimizers: Collection[str]) -> None:
        """Update the averages after a step of these optimizers."""
        for each in self._all:
            if each.optimizer is None or each.optimizer in optimizers:
                each.update(self.settings.decay_after(each.updates))

    @property
    def updates(self) -> int:
        return max(each.updates for each in self._all)

    @contextlib.contextmanager
    def shown(self, follow: Callable[[], None]) -> Iterator[None]:
        """Set the weights to their averages within the context.

        follow: callback that updates other copies of the weights, after they are set and after they are restored
        """
        pairs = [(value, each.average[name]) for each in self._all for name, value in each.live.items()]
        with torch.no_grad():
            kept = [value.detach().clone(memory_format=torch.preserve_format) for value, _ in pairs]
            for value, average in pairs:
                value.copy_(average)
        follow()
        try:
            yield
        finally:
            with torch.no_grad():
                for (value, _), before in zip(pairs, kept, strict=True):
                    value.copy_(before)
            follow()

    def tensors(self) -> dict[str, Tensor | Part]:
        """Return the averages by name, as they are kept, each with its position in the whole tensor."""
        return {name: self._local_state.part(name, value) for name, value in self._named()}

    def as_weights(self) -> dict[str, Tensor | Part]:
        """Return the model's tensors with the averages in place of the weights, in the dtypes of the model."""
        result = self._local_state.tensors()
        for each in self._all:
            for name, value in each.average.items():
                result[name] = self._local_state.part(name, value.to(each.live[name].dtype))
        return result

    def plain(self) -> Sequence[Tensor]:
        """Return the averages as plain tensors."""
        return [value for _, value in self._named()]

    def facts(self) -> dict[str, Any]:
        return {"updates": {str(each.optimizer or ""): each.updates for each in self._all}}

    @torch.no_grad()
    def restore(self, stored: Stored) -> bool:
        """Load the averages of a checkpoint, saved in any layout; return False if it has none.

        Averages that the checkpoint lacks start from the current weights.
        """
        facts = stored.facts.get("ema")
        local = self.tensors()
        names = [name for name in local if facts is not None and f"ema.{name}" in stored]
        stored.load({f"ema.{name}": local[name] for name in names})
        for each in self._all:
            for name in set(each.average) - set(names):
                each.average[name].copy_(each.live[name])
            each.updates = facts["updates"].get(str(each.optimizer or ""), 0) if facts is not None else 0
        return facts is not None

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for each in self._all for pair in each.average.items())

    def _weight(self, name: str) -> Tensor:
        exact = self._exact.get(name)
        return self._local_state.parameters[name].detach() if exact is None else exact()


def _floating(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in live.items() if value.is_floating_point() or value.is_complex()}


def _copy(value: Tensor) -> Tensor:
    wide = torch.float32 if value.dtype in NARROW else value.dtype
    return value.detach().to(wide, copy=True, memory_format=torch.preserve_format)


def _move(averages: list[Tensor], values: list[Tensor], decay: float) -> None:
    if decay == 0.0:
        torch._foreach_copy_(averages, values)
    else:
        torch._foreach_lerp_(averages, values, 1 - decay)
