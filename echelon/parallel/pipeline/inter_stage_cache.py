"""What the user's own code between units makes of placeholders, remembered from step to step.

Torch takes 0.2 ms to find out what an operation on placeholders gives, and 0.8 where a real tensor takes part: several
times what such an operation takes on a small stage's real tensors. But a stage is lent the same placeholders in every
step (``loans``), so that the same question has the same answer; to find it here takes some microseconds. The user's
code runs all the same: one that takes another way asks other questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.plan.fake_forward import as_module_output, placeholder

MOST_KNOWN = 10_000  # answers, or placeholders; where lengths vary, there are many
_PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, EllipsisType)
_NOT_IN_PLACE = ("__invert__", "__int__", "__index__", "__iter__", "requires_grad_", "share_memory_", "detach_")

_glue: ContextVar[InterStageCache | None] = ContextVar("glue", default=None)


class CachedPlaceholder(FakeTensor):
    """A placeholder that is the same object in every step. Operations on it ask the glue of the pass."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        glue = _glue.get()
        with torch._C.DisableTorchFunctionSubclass():
            if glue is None or getattr(function, "__name__", "") == "__get__":  # its looks are no operation
                return function(*args, **(kwargs or {}))
            return glue.operate(function, args, kwargs or {})


def lend(made: Tensor) -> Tensor:
    """``made``, a placeholder, as one that will be lent again."""
    if type(made) is FakeTensor:
        made.__class__ = CachedPlaceholder
    return made


class _Unknown(Exception):
    """An argument that cannot be compared with that of another step."""


class _Answer(NamedTuple):
    """``asked`` keeps alive what the question knows by its identity."""

    asked: list[Tensor]
    made: list[Tensor]
    result: Any


class InterStageCache:
    """The answers that the passes of one runner have found."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Answer] = {}
        self._times = defaultdict[Hashable, int](int)  # asked in this pass: equal results are no one object
        self._used: list[Hashable] = []

    def __enter__(self) -> None:
        self._before = _glue.set(self)

    def __exit__(self, *exception: object) -> None:
        """The pass is over. What was changed in place would keep what was put into it."""
        _glue.reset(self._before)
        self._times.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for question in self._used:
                answer = self._known.get(question)
                if answer is not None and any(map(is_changed, (*answer.asked, *answer.made))):
                    del self._known[question]
        self._used.clear()

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, or what it has been in a step before."""
        asked: list[Tensor] = []
        try:
            question: Hashable = (function, _looks(args, asked), _looks(kwargs, asked), surroundings())
        except _Unknown:
            return function(*args, **kwargs)
        times = self._times[question]
        self._times[question] = times + 1
        found = self.recall((question, times))
        if found is None:
            if _changes_its_first(function, args):
                return self._change(function, args, kwargs, (question, times), asked)
            versions = [tensor._version for tensor in asked]
            result = function(*args, **kwargs)
            made = _remade(result)
            if made is None or versions != [tensor._version for tensor in asked]:
                return result
            found = self.keep((question, times), asked, *made)
        return list(found.result) if type(found.result) is list else found.result

    def _change(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], question: Hashable, asked: list[Tensor]
    ) -> Any:
        """Of a placeholder that is changed in place nothing changes, but for its looks. To see that, change another."""
        changed, *others = args
        other = _like(changed)
        before = _seen_from_outside(other)
        result = function(other, *others, **kwargs)
        if before != _seen_from_outside(other) or (result is not None and result is not other):
            return function(*args, **kwargs)
        return self.keep(question, asked, [], None if result is None else changed).result

    def recall(self, question: Hashable) -> _Answer | None:
        found = self._known.get(question)
        if found is not None:
            self._used.append(question)
        return found

    def keep(self, question: Hashable, asked: list[Tensor], made: list[Tensor], result: Any) -> _Answer:
        """Where one of ``asked`` or ``made``, which are in ``result``, is changed, it is forgotten after the pass."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._used.append(question)
        self._known[question] = found = _Answer(asked, made, result)
        return found

    @staticmethod
    def question(*parts: Any) -> tuple[Hashable, list[Tensor]] | None:
        """``parts`` as they compare with those of another step, and the placeholders in them; None if they do not."""
        asked: list[Tensor] = []
        try:
            return (_looks(parts, asked), surroundings()), asked
        except _Unknown:
            return None


def is_changed(lent: Tensor) -> bool:
    """Whether it is no more what it was when it was made: changed in place, or told to want a gradient."""
    return bool(lent._version) or lent.requires_grad != (lent.grad_fn is not None)


def surroundings() -> Hashable:
    """What else an operation's result depends on."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_grad_enabled(), torch.get_default_dtype(), *casts


def _changes_its_first(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether it changes a tensor in place, by its name: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return (
        bool(args)
        and type(args[0]) is CachedPlaceholder
        and (name == "__setitem__" or (in_place and name not in _NOT_IN_PLACE))
    )


def _seen_from_outside(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad_fn is None


def _looks(value: Any, asked: list[Tensor]) -> Hashable:
    """A placeholder is itself, a real tensor what it looks like: no placeholder's looks depend on a value."""
    if isinstance(value, Tensor):
        return _tensor_looks(value, asked)
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[_looks(each, asked) for each in value])
    if kind is dict:
        return (kind, *value, *[_looks(each, asked) for each in value.values()])
    if kind is slice:
        return (kind, *[_looks(each, asked) for each in (value.start, value.stop, value.step)])
    if kind is torch.Size or isinstance(value, _PLAIN):
        return kind, value
    raise _Unknown


def _tensor_looks(value: Tensor, asked: list[Tensor]) -> Hashable:
    kind = type(value)
    if kind is CachedPlaceholder or (kind is FakeTensor and isinstance(value, nn.Parameter)):
        asked.append(value)
        return id(value)
    if (kind is Tensor or kind is nn.Parameter) and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    raise _Unknown


def _remade(result: Any) -> tuple[list[Tensor], Any] | None:
    """The tensors in ``result`` and itself, both without a history: it would keep real tensors of this step alive."""
    if isinstance(result, Tensor):
        made = _remade_tensor(result)
        return None if made is None else ([made], made)
    if type(result) not in (tuple, list) or not result:
        return None
    each = [_remade_tensor(part) for part in result]
    found = [part for part in each if part is not None]
    return (found, type(result)(found)) if len(found) == len(each) else None


def _remade_tensor(made: Any) -> Tensor | None:
    if type(made) is CachedPlaceholder:  # handed back as it was
        return made
    if type(made) is not FakeTensor or made.layout is not torch.strided or made.is_conj() or made.is_neg():
        return None
    return lend(_like(made))


def _like(tensor: Tensor) -> Tensor:
    made = placeholder(tensor)
    return as_module_output(made) if tensor.requires_grad else made
