"""Compiles modules in place with torch.compile, without changing names or state; runs them uncompiled on failure."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.module import _has_any_global_hook

from echelon.base.errors import first_line
from echelon.base.formatting import things
from echelon.fastpath.guards import PythonGuards
from echelon.strategy.fastpath_choice import WHOLE

Say = Callable[[str], None]

#: Backend of torch.compile; tests replace it.
backend: str | Callable[..., Any] = "inductor"

#: Compiled programs per code object, in addition to one for each block: for other lengths and modes. Torch's limit is 8
#: in total, and blocks whose code reads their own index need one program each.
SPARE = 8

_LONGEST = 160  #: characters of a reason in a line

#: Parts of torch's error messages for operations that fail only in compiled code.
CANNOT = ("aot_autograd does not currently support double backward", "donated buffer")

#: The first torch version that guards on class attributes; earlier ones go on with the old value after a change.
NOTICES = (2, 13)


class ModuleCompiler:
    """Compiles parts of one model. After the first failure the whole step runs uncompiled."""

    def __init__(self, say: Say, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._say, self._model, self._loss = say, model, loss
        self.gave_up = False
        self.in_step = False  #: True while a step runs, for which ``begin`` has been called
        self._recovers = False
        self._made = False  # True if any module has been compiled to a program
        self._errors = _errors()
        self._breaks = _graph_breaks().total()
        self._unnoticed: PythonGuards | None = None

    def begin(self) -> None:
        """Check class attributes before a step; give up compiling if one has changed that torch does not guard."""
        if self.gave_up or _version() >= NOTICES:
            return
        if self._unnoticed is None:
            self._unnoticed = PythonGuards(self._model, self._loss, of_classes=True)
        changed = self._unnoticed.changed()
        if changed is not None:
            self.gave_up = True
            self._say(
                f"fast: compile disabled: {changed} has changed, forward or loss may read it, and torch "
                f"{torch.__version__} "
                "has no guard for it (torch 2.13 has; any version guards attributes of objects)"
            )

    @contextlib.contextmanager
    def step(self, recovers: bool) -> Iterator[None]:
        """Mark a forward pass of the engine within the context.

        recovers: True if the caller runs the whole pass again after a failure
        """
        self.in_step, self._recovers = True, recovers
        try:
            yield
        finally:
            self.in_step = self._recovers = False

    def modules(self, model: nn.Module, names: Iterable[str]) -> None:
        """Compile each of these modules. When a shape changes, the second program is compiled for any length."""
        from echelon.parallel.zero.sharded_modules import compile_inside
        from echelon.plan.fake_forward import is_placeholder

        chosen = [model if name == WHOLE else model.get_submodule(name) for name in names]
        _configure(len(chosen) + SPARE)
        _report_limit(self._say)
        _forget_programs(chosen)
        code = _inside(print).__code__.replace()
        for module in chosen:
            if any(is_placeholder(parameter) for parameter in module.parameters()):
                continue  # another stage runs it; here it computes shapes
            if compile_inside(module, lambda forward: self._compiled(forward, code)):
                continue
            call = _entered(module, code) if _is_of_torch(module) else torch.compile(module._call_impl, backend=backend)
            put_in_place(module, self._guarded(self._counted(call), module._call_impl))

    def _compiled(self, forward: Callable[..., Any], code: CodeType) -> Callable[..., Any]:
        return self._guarded(self._counted(_with_code(forward, code)), forward)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled version of a function, such as a loss."""
        inside = _inside(function)
        inside.__code__ = inside.__code__.replace()
        return self._guarded(torch.compile(inside, backend=backend), function)

    def _guarded(self, compiled: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        from torch._subclasses.fake_tensor import FakeTensor

        def call(*args: Any, **kwargs: Any) -> Any:
            again = _is_in_backward()
            if not self.in_step and not again:  # called from a user-written loop
                self.begin()
            # Evaluation runs uncompiled: its shapes and modes would be compiled again, mostly for a few batches.
            if self.gave_up or not torch.is_grad_enabled() or _is_traced() or (again and not _is_recomputing()):
                return plain(*args, **kwargs)
            if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):  # in a pass of another stage
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

    def report_if_nothing_was_made(self) -> None:
        if not self._made and not self.gave_up:
            self._say(
                "fast: compile has no effect: the compiler has found nothing to compile in the model (it skips "
                "recurrent layers, "
                "graph breaks inside loops, blocks that are not called as modules, and checkpoints with "
                "use_reentrant=True)"
            )

    def report_graph_breaks(self) -> None:
        """Report how often the compiler has left code in the compiled modules uncompiled, and the commonest reason."""
        found = _graph_breaks()
        count = found.total() - self._breaks
        if count > 0 and not self.gave_up:
            reason = " ".join(found.most_common(1)[0][0].split())
            self._say(
                f"fast: {things(count, 'graph break')} in compiled code, which runs uncompiled in between: "
                f"{reason[:_LONGEST]}{'...' if len(reason) > _LONGEST else ''}"
            )

    def failed(self, error: BaseException) -> bool:
        """Return True if the error came from the compiler or from an operation that compiled code cannot do.

        The compiler may also fail in backward, which it compiles when it first runs.
        """
        cannot = isinstance(error, RuntimeError) and any(words in str(error) for words in CANNOT)
        return not self.gave_up and (cannot or isinstance(error, self._errors))

    def give_up(self, error: BaseException) -> None:
        self.gave_up = True
        error = getattr(error, "inner_exception", error)
        self._say(f"fast: compile disabled: compiling failed ({type(error).__name__}: {first_line(error)})")


def _is_of_torch(module: nn.Module) -> bool:
    """Return True if the module's forward is torch's own, as in Sequential and TransformerEncoderLayer.

    The compiler skips such code unless other code calls it.
    """
    own = "forward" in vars(module)
    return not own and str(getattr(module.forward, "__module__", "")).partition(".")[0] == "torch"


def _entered(module: nn.Module, code: CodeType) -> Callable[..., Any]:
    """Return a call of the module with a compiled forward.

    Hooks are not compiled, as for a forward in user code: compiled hooks would be constants.

    code: code object shared by all equal modules, so that one program serves all of them
    """
    compiled = _with_code(module.forward, code)

    def call(*args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(module):  # user code has replaced forward since
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not has_hooks(module):
            return compiled(*args, **kwargs)
        module.forward = compiled
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            del module.forward

    return call


def _with_code(function: Callable[..., Any], code: CodeType) -> Callable[..., Any]:
    """Return a compiled function; all with one code object, such as those of equal modules, share programs."""
    inside = _inside(function)
    inside.__code__ = code
    compiled: Callable[..., Any] = torch.compile(inside, backend=backend)
    return compiled


def _inside(function: Callable[..., Any]) -> Any:
    """Return a wrapper of the function whose code object can be replaced.

    Torch's recompile limit is counted per code object, so a function with its own code object has its own limit.
    """

    def inside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inside


def is_compiled(module: nn.Module) -> bool:
    """Return True if user code has compiled the module."""
    compiled = getattr(module, "_compiled_call_impl", None)
    return hasattr(module, "_orig_mod") or (compiled is not None and not is_ours(module))


class ModuleCallOverride:
    """Function that replaces a module's call; deep copies and pickles of the module do not contain it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def put_in_place(module: nn.Module, call: Callable[..., Any]) -> None:
    module._compiled_call_impl = ModuleCallOverride(call)


def is_ours(module: nn.Module) -> bool:
    return isinstance(module._compiled_call_impl, ModuleCallOverride)


def forget(model: nn.Module) -> None:
    """Remove the overrides that an earlier engine has set."""
    for module in model.modules():
        if is_ours(module):
            module._compiled_call_impl = None


def has_hooks(module: nn.Module) -> bool:
    """Return True if this module has hooks around its call, or if there are global module hooks."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or _has_any_global_hook()  # type: ignore[no-untyped-call]


def _errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def _programs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _graph_breaks() -> Counter[str]:
    """Return the number of graph breaks in this process so far, by reason."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def _is_traced() -> bool:
    """Return True while torch.jit or torch.fx traces the operations."""
    return bool(torch.jit.is_tracing()) or is_fx_symbolic_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_recomputing() -> bool:
    """Return True if a recomputation in backward repeats a forward that recorded gradients, and so was compiled.

    A reentrant checkpoint ran its forward without gradients and uncompiled; compiled code would draw other random
    numbers.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _forget_programs(modules: Iterable[nn.Module]) -> None:
    """Drop the programs of earlier models of the same classes, which count towards the limit of their code objects."""
    from torch._dynamo import reset_code  # type: ignore[attr-defined]

    forwards = (getattr(type(module), "forward", None) for module in modules)  # a scripted module's class has none
    for code in {getattr(forward, "__code__", None) for forward in forwards}:
        if isinstance(code, CodeType):
            reset_code(code)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _configure(programs: int) -> None:
    from torch._dynamo import config

    config.skip_nnmodule_hook_guards = False  # otherwise a hook that is added later would not run
    config.recompile_limit = max(config.recompile_limit, programs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * programs)


def _report_limit(say: Say) -> None:
    """Report the recompile limit in one line, instead of torch's ten lines per code object."""
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
            "there are too many shapes to compile for, and new ones run uncompiled; pad batches to a few lengths "
            "(buckets) to have them compiled"
        )
    known = f" ({reason})" if "==" in reason else ""
    return f"code is recompiled too often, for a value that changes{known}; new values run uncompiled"
