"""Compiling modules in place, so that names and state stay as they are, and going on without it where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from echelon.fast.chosen import WHOLE
from echelon.fast.hooks import has_hooks
from echelon.fast.readings import Readings

Say = Callable[[str], None]

#: For tests: another compiler than torch's own.
backend: str | Callable[..., Any] = "inductor"

#: Programs for one piece of code, beyond one for each block: other lengths, other modes. Torch's limit is 8 in all, and
#: blocks whose code reads their own number take one each.
SPARE = 8


#: The first torch whose compiled code notices when an attribute of a class changes; before, it goes on with the old.
NOTICES = (2, 13)


class Compiling:
    """What was compiled in one model. The first failure ends all of it: the step is then run as it was written."""

    def __init__(self, say: Say, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._say, self._model, self._loss = say, model, loss
        self.given_up = False
        self._errors = _errors()
        self._unnoticed: Readings | None = None

    def begin(self) -> None:
        """Goes before every step."""
        if self.given_up or _version() >= NOTICES:
            return
        if self._unnoticed is None:
            self._unnoticed = Readings(self._model, self._loss, of_classes=True)
        changed = self._unnoticed.changed()
        if changed is not None:
            self.given_up = True
            self._say(
                f"fast: {changed} has changed, which forward or loss may read, and torch {torch.__version__} would not "
                "notice; so it goes on uncompiled (torch 2.13 notices, and any does where an object holds it)"
            )

    def modules(self, model: nn.Module, names: Iterable[str]) -> None:
        """Compile each of these modules. Shapes that change are compiled a second time, then for any length."""
        chosen = [model if name == WHOLE else model.get_submodule(name) for name in names]
        _configure(len(chosen) + SPARE)
        _tell_of_limit(self._say)
        code = _inside(print).__code__.replace()
        for module in chosen:
            call = _entered(module, code) if _is_of_torch(module) else torch.compile(module._call_impl, backend=backend)
            module._compiled_call_impl = self._guarded(call, module._call_impl)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a function, such as a loss."""
        inside = _inside(function)
        inside.__code__ = inside.__code__.replace()
        return self._guarded(torch.compile(inside, backend=backend), function)

    def _guarded(self, compiled: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Evaluation runs as written: its shapes and modes would be compiled again, mostly for a few batches.
            if self.given_up or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except self._errors as error:
                self.give_up(error)
                return plain(*args, **kwargs)

        call.is_ours = True  # type: ignore[attr-defined]
        return call

    def failed(self, error: BaseException) -> bool:
        """Whether this came from the compiler. It compiles the backward pass when that first runs."""
        return not self.given_up and isinstance(error, self._errors)

    def give_up(self, error: BaseException) -> None:
        self.given_up = True
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        self._say(f"fast: compiling failed, and it goes on uncompiled ({type(error).__name__}: {reason})")


def _is_of_torch(module: nn.Module) -> bool:
    """Whether its forward is torch's own, such as that of Sequential and TransformerEncoderLayer. The compiler passes
    over such code unless it is called from some other."""
    return str(getattr(module.forward, "__module__", "")).partition(".")[0] == "torch"


def _entered(module: nn.Module, code: CodeType) -> Callable[..., Any]:
    """A call with a compiled forward. Hooks stay outside of it, as they do where forward is a user's: compiled, they
    would be taken for fixed. ``code``: of all modules that are alike, so that one program can serve them all."""
    inside = _inside(module.forward)
    inside.__code__ = code
    compiled: Any = torch.compile(inside, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not has_hooks(module):
            return compiled(*args, **kwargs)
        module.forward = compiled
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            del module.forward

    return call


def _inside(function: Callable[..., Any]) -> Any:
    """The function as part of one that is nobody's. Programs are kept with a function's code, up to a limit: who wants
    a limit of his own gives it code of its own."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inside


def is_compiled(module: nn.Module) -> bool:
    """By somebody else."""
    compiled = getattr(module, "_compiled_call_impl", None)
    return hasattr(module, "_orig_mod") or (compiled is not None and not hasattr(compiled, "is_ours"))


def forget(model: nn.Module) -> None:
    """Undo what was compiled here for an earlier engine."""
    for module in model.modules():
        if hasattr(module._compiled_call_impl, "is_ours"):
            module._compiled_call_impl = None


def _errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _configure(programs: int) -> None:
    from torch._dynamo import config

    config.skip_nnmodule_hook_guards = False  # else a hook that comes later is not run
    config.recompile_limit = max(config.recompile_limit, programs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * programs)


def _tell_of_limit(say: Say) -> None:
    """Torch says it in ten lines of its own, once for each piece of code."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    for old in [old for old in logger.filters if isinstance(old, _Limit)]:
        logger.removeFilter(old)
    logger.addFilter(_Limit(say))


class _Limit(logging.Filter):
    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say: Say | None = say

    def filter(self, record: logging.LogRecord) -> bool:
        if "torch._dynamo hit config." not in str(record.msg):
            return True
        if self._say is not None:
            self._say(
                "fast: there are too many shapes to compile for, and those that come new run uncompiled; pad batches "
                "to a few lengths (buckets) to have them compiled"
            )
            self._say = None
        return False
