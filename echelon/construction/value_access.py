"""``ValueAccess``: answers what a constructor asks a recorded tensor without an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon.construction.recorder import ConstructionRecorder


class ValueAccess(TorchFunctionMode):
    """Shows recorded tensors as tensors on the CPU, and hands out their values to NumPy and Python."""

    def __init__(self, recorder: ConstructionRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda tensor: torch.device("cpu"),
            Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda tensor: True,  # type: ignore[attr-defined]
            Tensor.get_device: lambda tensor: -1,
        }
        self._readers = (Tensor.__repr__, Tensor.tolist)
        self._writers = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr)  # they give access to the memory itself

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if not isinstance(first, Tensor):
            return func(*args, **kwargs)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return func(first, self._data(first, args[1]))
        if func not in self._known() or not self._is_recorded(first):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func](first)
        value = self._recorder.values(first)
        if func in self._writers:
            self._recorder.tape.write(first, value)
        return func(value, *args[1:], **kwargs)

    def _known(self) -> set[Any]:
        return {*self._answers, *self._readers, *self._writers}

    def _is_recorded(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor in self._recorder.tape

    def _data(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return the value for ``tensor.data = value``: torch accepts only one of the same kind, real or recorded."""
        recorded, given = self._is_recorded(tensor), self._is_recorded(value)
        if recorded == given:
            return value
        if given:
            return self._recorder.values(value)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._recorder.tape.adopt(made)
        return made.copy_(value.detach())
