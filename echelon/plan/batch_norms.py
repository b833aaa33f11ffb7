"""Detection of modules that use batch statistics: torch's batch norms, and forwards that call ``F.batch_norm``."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm
#: Layers of these classes that call F.batch_norm standardize their weight, which needs no statistics of other replicas.
_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)
_CALL = "batch_norm"


def batch_norm_names(model: nn.Module) -> list[str]:
    """Return the names of modules that normalize by batch statistics."""
    return [name for name, module in model.named_modules() if isinstance(module, BatchNorm) or _normalizes(module)]


def _normalizes(module: nn.Module) -> bool:
    return not isinstance(module, _WEIGHTED) and calls_batch_norm(type(module))  # type: ignore[arg-type]


@functools.cache
def calls_batch_norm(kind: type[nn.Module]) -> bool:
    """Return True if forward of this class, or a method or function that it calls by name, calls ``F.batch_norm``.

    The result is read from the bytecode, so that the plan has it before anything runs, and all ranks agree. Other calls
    (from a table of functions, say) are not found.
    """
    return _calls(kind, getattr(kind, "forward", None), set(), DEPTH)


#: Depth to which nested calls are followed; layers are rarely deeper, and library helpers would lead everywhere.
DEPTH = 4


def _calls(kind: type[nn.Module], function: object, seen: set[CodeType], depth: int) -> bool:
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or function.__code__ in seen or _is_of_torch(function):
        return False
    seen.add(function.__code__)
    codes = list(_codes(function.__code__))
    if any(_names_the_call(code) for code in codes):
        return True
    names = {name for code in codes for name in code.co_names} if depth else set()
    called = [inspect.getattr_static(kind, name, None) or function.__globals__.get(name) for name in sorted(names)]
    return any(_calls(kind, getattr(each, "__func__", each), seen, depth - 1) for each in called)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code object, and those of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names_the_call(code: CodeType) -> bool:
    """Return True for ``F.batch_norm``, ``torch.batch_norm``, ``batch_norm``; not for the layer ``self.batch_norm``."""
    if _CALL not in code.co_names:
        return False
    before: Any = None
    for one in dis.get_instructions(code):
        if one.argval == _CALL and one.opname.startswith("LOAD"):
            is_global = one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            if is_global or before.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") or before.argval in _MODULES:
                return True
        before = one
    return False


_MODULES = ("functional", "F")


def _is_of_torch(thing: type | FunctionType) -> bool:
    return str(thing.__module__).partition(".")[0] == "torch"
