"""Compiling modules in place, so that names and state stay as they are, and going on without it where it fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from echelon.fastpath.guards import PythonGuards
from echelon.fastpath.module_call import is_ours, put_in_place
from echelon.fastpath.user_hooks import has_hooks
from echelon.strategy.fastpath_choice import WHOLE

Say = Callable[[str], None]

#: For tests: another compiler than torch's own.
backend: str | Callable[..., Any] = "inductor"

#: Programs for one piece of code, beyond one for each block: other lengths, other modes. Torch's limit is 8 in all, and
#: blocks whose code reads their own number take one each.
SPARE = 8


#: In words of torch, what compiled code cannot do and uncompiled can.
CANNOT = ("aot_autograd does not currently support double backward", "donated buffer")

#: The first torch whose compiled code notices when an attribute of a class changes; before, it goes on with the old.
NOTICES = (2, 13)


class ModuleCompiler:
    """What was compiled in one model. The first failure ends all of it: the step is then run as it was written."""

    def __init__(self, say: Say, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._say, self._model, self._loss = say, model, loss
        self.given_up = False
        self.in_step = False  #: under way, so that ``begin`` has been called
        self._recovers = False
        self._made = False  # any program of a module
        self._errors = _errors()
        self._unnoticed: PythonGuards | None = None

    def begin(self) -> None:
        """Goes before every step."""
        if self.given_up or _version() >= NOTICES:
            return
        if self._unnoticed is None:
            self._unnoticed = PythonGuards(self._model, self._loss, of_classes=True)
        changed = self._unnoticed.changed()
        if changed is not None:
            self.given_up = True
            self._say(
                f"fast: {changed} has changed, which forward or loss may read, and torch {torch.__version__} would not "
                "notice; so it goes on uncompiled (torch 2.13 notices, and any does where an object holds it)"
            )

    @contextlib.contextmanager
    def step(self, recovers: bool) -> Iterator[None]:
        """A forward pass of the engine's. ``recovers``: should it fail, all of it is done again."""
        self.in_step, self._recovers = True, recovers
        try:
            yield
        finally:
            self.in_step = self._recovers = False

    def modules(self, model: nn.Module, names: Iterable[str]) -> None:
        """Compile each of these modules. Shapes that change are compiled a second time, then for any length."""
        chosen = [model if name == WHOLE else model.get_submodule(name) for name in names]
        _configure(len(chosen) + SPARE)
        _tell_of_limit(self._say)
        _forget_programs(chosen)
        code = _inside(print).__code__.replace()
        for module in chosen:
            call = _entered(module, code) if _is_of_torch(module) else torch.compile(module._call_impl, backend=backend)
            put_in_place(module, self._guarded(self._counted(call), module._call_impl))

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a function, such as a loss."""
        inside = _inside(function)
        inside.__code__ = inside.__code__.replace()
        return self._guarded(torch.compile(inside, backend=backend), function)

    def _guarded(self, compiled: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            again = _is_in_backward()
            if not self.in_step and not again:  # in a loop of the user's own
                self.begin()
            # Evaluation runs as written: its shapes and modes would be compiled again, mostly for a few batches.
            if self.given_up or not torch.is_grad_enabled() or _is_traced() or (again and not _is_recomputing()):
                return plain(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except self._errors as error:
                if self._recovers:
                    raise
                self.give_up(error)
                return plain(*args, **kwargs)

        return call

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._made:
                return call(*args, **kwargs)
            before = _programs()
            try:
                return call(*args, **kwargs)
            finally:
                self._made = _programs() > before

        return counted

    def tell_if_nothing_was_made(self) -> None:
        if not self._made and not self.given_up:
            self._say(
                "fast: the compiler has found nothing to compile in the model, which runs as written (it passes over "
                "recurrent layers, over code that breaks off inside loops, over blocks that are not called as such, "
                "and over checkpoints with use_reentrant=True)"
            )

    def failed(self, error: BaseException) -> bool:
        """Whether this came from the compiler. It compiles the backward pass when that first runs, and there are things
        that a compiled one cannot do."""
        cannot = isinstance(error, RuntimeError) and any(words in str(error) for words in CANNOT)
        return not self.given_up and (cannot or isinstance(error, self._errors))

    def give_up(self, error: BaseException) -> None:
        self.given_up = True
        error = getattr(error, "inner_exception", error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        self._say(f"fast: compiling failed, and it goes on uncompiled ({type(error).__name__}: {reason})")


def _is_of_torch(module: nn.Module) -> bool:
    """Whether its forward is torch's own, such as that of Sequential and TransformerEncoderLayer. The compiler passes
    over such code unless it is called from some other."""
    own = "forward" in vars(module)
    return not own and str(getattr(module.forward, "__module__", "")).partition(".")[0] == "torch"


def _entered(module: nn.Module, code: CodeType) -> Callable[..., Any]:
    """A call with a compiled forward. Hooks stay outside of it, as they do where forward is a user's: compiled, they
    would be taken for fixed. ``code``: of all modules that are alike, so that one program can serve them all."""
    inside = _inside(module.forward)
    inside.__code__ = code
    compiled: Any = torch.compile(inside, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(module):  # somebody has put another in its place since
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
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
    return hasattr(module, "_orig_mod") or (compiled is not None and not is_ours(module))


def _errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def _programs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _is_traced() -> bool:
    """By something that wants to see the operations."""
    return bool(torch.jit.is_tracing()) or is_fx_symbolic_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_recomputing() -> bool:
    """In backward, whether what is run again had its gradients recorded in forward, and so was compiled. A reentrant
    checkpoint ran it without them, as written; compiled now, it would draw other random numbers than then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _forget_programs(modules: Iterable[nn.Module]) -> None:
    """Of earlier models of the same classes, which count against a limit: it is one for each piece of code."""
    from torch._dynamo import reset_code  # type: ignore[attr-defined]

    forwards = (getattr(type(module), "forward", None) for module in modules)  # none in a scripted module's class
    for code in {getattr(forward, "__code__", None) for forward in forwards}:
        if isinstance(code, CodeType):
            reset_code(code)


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
    for old in [old for old in logger.filters if isinstance(old, _RecompileLimitFilter)]:
        logger.removeFilter(old)
    logger.addFilter(_RecompileLimitFilter(say))


class _RecompileLimitFilter(logging.Filter):
    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say: Say | None = say

    def filter(self, record: logging.LogRecord) -> bool:
        if "torch._dynamo hit config." not in str(record.msg):
            return True
        if self._say is not None:
            reason = record.getMessage().partition("last reason: ")[2].partition("\n")[0].partition(": ")[2]
            self._say(f"fast: {_too_often(reason.partition('#')[0].strip())}")
            self._say = None
        return False


def _too_often(reason: str) -> str:
    if "size mismatch" in reason or ".size()" in reason or "stride" in reason:
        return (
            "there are too many shapes to compile for, and those that come new run uncompiled; pad batches to a few "
            "lengths (buckets) to have them compiled"
        )
    known = f" ({reason})" if "==" in reason else ""
    return f"code is compiled anew too often, for a value that changes{known}, and what comes new runs uncompiled"
