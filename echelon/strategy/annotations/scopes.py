"""Scopes: context managers that tag the modules built inside them with a mark.

Modules constructed or assigned inside ``with echelon.split(): ...`` are tagged, with torch's public hooks on the
registration of modules and parameters. The hooks are installed only while a scope is open. Tags are plain attributes:
a deep copy keeps them, and a state dict does not contain them.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from echelon.base.errors import UsageError

if TYPE_CHECKING:  # commands read marks before torch is imported
    from torch import nn

_TAGS = "_echelon_marks"


@dataclass
class _OpenScope:
    """An open scope: its mark, and the stack frames that were active when the scope was opened."""

    mark: Any
    text: str
    began_in: set[FrameType]
    next_stage: int = 0
    tagged: bool = field(default=False)


class _Stack(threading.local):
    """The open scopes of one thread; they do not affect models that other threads build."""

    def __init__(self) -> None:
        self.scopes: list[_OpenScope] = []


_stack = _Stack()


class _Hooks:
    """The registration hooks, installed once while any thread has a scope open."""

    def __init__(self) -> None:
        self._lock, self._users, self._handles = threading.Lock(), 0, list[Any]()

    def acquire(self) -> None:
        from torch.nn.modules import module as torch_module

        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [
                    torch_module.register_module_module_registration_hook(_on_module),
                    torch_module.register_module_parameter_registration_hook(_on_parameter),
                ]

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for handle in self._handles:
                    handle.remove()


_hooks = _Hooks()


class Scope:
    """Base class of marks: makes a mark usable in a ``with`` statement."""

    def opened(self) -> Scope:
        """Return the mark for modules inside this use of the scope."""
        return self

    def __enter__(self) -> Scope:
        mark = self.opened()
        for outer in _stack.scopes:
            refuse_nesting(outer.mark, mark, f"{mark} inside {outer.mark}")
        _stack.scopes.append(_OpenScope(mark, str(mark), _running()))
        _hooks.acquire()
        return mark

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        closed = _stack.scopes.pop()
        _hooks.release()
        if kind is None and not closed.tagged:
            raise UsageError(
                f"nothing was marked by {closed.text}: no module was made or assigned inside its scope; build the "
                "module inside, or mark it by name with echelon.annotate(model, {name: mark})"
            )
        return False


def count_stage(index: int | None) -> int:
    """Return the number of the stage that is opened: ``index``, or one more than the pipeline's last stage."""
    around = next((scope for scope in reversed(_stack.scopes) if _kind(scope.mark) == "Pipeline"), None)
    if around is None:
        if index is None:
            raise UsageError(
                "stage() counts the stages of a pipeline and none is open; open echelon.pipeline() or say stage(0)"
            )
        return index
    number = around.next_stage if index is None else index
    around.next_stage = number + 1
    return number


#: (outer, inner) -> the reason why they cannot be nested, and the remedy. All other pairs can be nested.
_REFUSED = {
    ("Stage", "Stage"): "a module runs in one stage; close the first stage before the next",
    ("Split", "Stage"): "a stage has the devices that a split is over; put the split inside the stage",
    ("Split", "Replicate"): "the parts of a split module are on different devices; put the split inside replicate()",
    ("Stage", "Pipeline"): "a pipeline consists of stages; put the stages inside the pipeline",
    ("Split", "Pipeline"): "a stage has the devices that a split is over; put the split inside the stages",
    ("Pipeline", "Pipeline"): "a model has one pipeline; continue the numbers of its stages",
}
_SPLIT_TWICE = "a part is split in one way; leave out the inner mark, or mark the parts and not the whole"


def refuse_nesting(outer: Any, inner: Any, where: str) -> None:
    """Raise UsageError if ``inner`` must not be inside ``outer``; ``where`` names the modules or scopes."""
    reason = _REFUSED.get((_kind(outer), _kind(inner)))
    if _kind(outer) == _kind(inner) == "Split" and outer != inner:
        reason = _SPLIT_TWICE
    if reason:
        raise UsageError(f"{where}: {reason}")


def _kind(mark: Any) -> str:
    return type(mark).__name__


def tags(module: nn.Module) -> tuple[Any, ...]:
    """Return the marks on this module itself."""
    result: tuple[Any, ...] = module.__dict__.get(_TAGS, ())
    return result


def tag(module: nn.Module, mark: Any, name: str) -> None:
    """Attach ``mark`` to ``module``, unless the module has it; ``name`` is for error messages.

    Raises UsageError if the module has another mark of the same kind.
    """
    present = tags(module)
    for other in present:
        if _kind(other) == _kind(mark) and other != mark:
            raise UsageError(f"'{name}' is marked {other} and {mark}: a module has one {_kind(mark).lower()}; drop one")
    if not any(is_same(other, mark) for other in present):
        module.__dict__[_TAGS] = (*present, mark)


def is_same(one: Any, other: Any) -> bool:
    """Return True if the marks are equal; two pipelines with equal settings are still different marks."""
    return one is other or (bool(one == other) and _kind(one) != "Pipeline")


def _running() -> set[FrameType]:
    """Return all active stack frames of this thread."""
    frame: FrameType | None = sys._getframe(1)
    result = set()
    while frame is not None:
        result.add(frame)
        frame = frame.f_back
    return result


def _on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    for scope in _stack.scopes:
        if child is not None:
            _tag_by(scope, child, name)
        if _made_inside(parent, scope):
            _tag_by(scope, parent, type(parent).__name__)


def _on_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
    for scope in _stack.scopes:
        if _made_inside(owner, scope):
            _tag_by(scope, owner, type(owner).__name__)


def _tag_by(scope: _OpenScope, module: nn.Module, name: str) -> None:
    tag(module, scope.mark, name)
    scope.tagged = True


def _made_inside(module: nn.Module, scope: _OpenScope) -> bool:
    """Return True if the constructor of ``module`` was called inside the scope, not if it opened the scope.

    torch has no public hook on construction, so the stack frames since the scope was opened are searched for
    ``__init__`` of the module. This tags a module that is only assigned to a variable:
    ``with split(): head = nn.Linear(...)``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame not in scope.began_in:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False
