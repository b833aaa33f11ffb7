"""Base class of echelon's optimizers: foreach steps, validated settings, and fp32 state that survives loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.base.errors import UsageError
from echelon.optim.shared_groups import SharingOptimizer

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bound:
    """A condition on a setting: a test, and its description for error messages."""

    holds: Callable[[float], bool]
    words: str

    def check(self, owner: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            return  # a learning rate on the device: reading it would synchronize with the device
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not self.holds(value):
            raise UsageError(f"{owner}({name}={value!r}): expected {self.words}")


NOT_NEGATIVE = Bound(lambda value: value >= 0, "a number of 0 or more")
POSITIVE = Bound(lambda value: value > 0, "a number above 0")
FRACTION = Bound(lambda value: 0 <= value < 1, "a number from 0 up to, not including, 1")


@dataclass
class Bundle:
    """Parameters of one group that one foreach call can update: they share device, dtype and step count."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    def state(self, key: str) -> list[Tensor]:
        return [state[key] for state in self.states]

    def picked(self, wanted: list[bool]) -> Bundle:
        """Return the bundle of those parameters whose entry in ``wanted`` is True."""

        def pick(items: list[Any]) -> list[Any]:
            return [item for item, want in zip(items, wanted, strict=True) if want]

        return Bundle(self.group, pick(self.params), pick(self.grads), pick(self.states))


class ForeachOptimizer(SharingOptimizer):
    """A torch optimizer whose step updates bundles of parameters instead of one parameter at a time.

    State and arithmetic of 16-bit parameters are fp32, because momentum in bfloat16 loses every contribution smaller
    than 1/256 of its value.
    """

    bounds: ClassVar[dict[str, Bound]] = {}

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check(defaults)
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{type(self).__name__}: {' '.join(str(error).split())}") from None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            self._check(param_group)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters once; if ``closure`` is given, call it first and return the loss it computes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for bundle in self._bundles(group):
                self._update(bundle)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, except that fp32 state of 16-bit parameters stays fp32."""
        super().load_state_dict(state_dict)
        self._restore_precision(state_dict)

    def _restore_precision(self, stored: dict[str, Any]) -> None:
        for group, kept in zip(self.param_groups, stored["param_groups"], strict=True):
            for param, key in zip(group["params"], kept["params"], strict=True):
                if param.dtype in HALVES and key in stored["state"]:
                    self.state[param] = {
                        name: value.to(param.device, torch.float32, copy=True) if isinstance(value, Tensor) else value
                        for name, value in stored["state"][key].items()
                    }

    def _check(self, settings: dict[str, Any]) -> None:
        for name, bound in self.bounds.items():
            if name in settings:
                values = settings[name] if isinstance(settings[name], tuple | list) else [settings[name]]
                for value in values:
                    bound.check(type(self).__name__, name, value)

    def _bundles(self, group: dict[str, Any]) -> Iterator[Bundle]:
        # This loop runs for every parameter in every step, and a GPU waits for it. Therefore it uses local names, and
        # compares a key with the last one before hashing it.
        found: dict[Any, Bundle] = {}
        last: Any = None
        states, dense = self.state, torch.strided
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not dense:
                self._refuse(group, index)
            state = states[param]
            if not state:
                if not param.dtype.is_floating_point:
                    self._refuse(group, index)
                state.update(self._begin(param, group))
            key = (param.dtype, param.device, state.get("step"))
            if key != last:
                bundle, last = found.setdefault(key, Bundle(group, [], [], [])), key
            bundle.params.append(param)
            bundle.grads.append(grad)
            bundle.states.append(state)
        yield from found.values()

    def _refuse(self, group: dict[str, Any], index: int) -> None:
        param = group["params"][index]
        names = group.get("param_names")
        which = f"'{names[index]}'" if names else f"of shape {tuple(param.shape)}"
        ours = type(self).__name__
        if not param.dtype.is_floating_point:
            raise UsageError(f"{ours} trains floating-point parameters, and parameter {which} is {param.dtype}")
        raise UsageError(
            f"{ours} needs dense gradients, and parameter {which} has a sparse one; use sparse=False, or give that "
            "parameter to torch.optim.SparseAdam"
        )

    def _begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        raise NotImplementedError

    def _update(self, bundle: Bundle) -> None:
        raise NotImplementedError


def zeros_for(param: Tensor) -> Tensor:
    """Return zeros with the shape and memory layout of a parameter, in fp32 if the parameter is 16-bit."""
    dtype = torch.float32 if param.dtype in HALVES else param.dtype
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def as_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors themselves, or fp32 copies if they are 16-bit."""
    if tensors[0].dtype not in HALVES:
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def write_back(params: list[Tensor], values: list[Tensor]) -> None:
    """Copy the updated values into the parameters, if ``as_fp32`` made copies."""
    if values is not params:
        torch._foreach_copy_(params, values)
