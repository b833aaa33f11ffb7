"""Compilation of the kernels, and intrinsics that numba lacks: raw memory access and the prefetch instruction.

Kernels are compiled at the first call, and the result is cached on disk. Kernels release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from echelon.base.kernel_cache import cached_jit

Function = TypeVar("Function", bound=Callable[..., Any])

_HERE = Path(__file__).parent
#: All sources that go into the kernels of parameter servers.
SOURCES = (
    *sorted(_HERE.glob("*.py")),
    *(_HERE.parent / name for name in ("persistence/file_record.py", "protocol/hashing.py", "protocol/job_spec.py")),
)

_ALIGNED = 4  # records are 32-bit words


def kernel(function: Function) -> Function:
    """Compile a kernel at its first call; the result is kept for exactly these sources."""
    return cached_jit(SOURCES, nogil=True)(function)


def inner(function: Function) -> Function:
    """Compile a function that only kernels call, never Python; it is compiled together with the kernels that use it."""
    return cast(Function, numba.njit(nogil=True)(function))


class _Alias:
    """The memory of an array, described as writable."""

    def __init__(self, array: NDArray[Any]) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self.array = array  # numpy keeps this object alive, and with it the memory


def readable(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return ``array`` in the form that kernels take: contiguous, aligned, of ``dtype``, and not marked read-only.

    Arrays from a network buffer are read-only, which is another type to numba: every kernel would be compiled twice.
    Kernels must not write to the returned array.
    """
    plain = np.ascontiguousarray(array, dtype)
    if not plain.flags.aligned:
        return plain.copy()
    return plain if plain.flags.writeable else np.asarray(_Alias(plain))


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _loading(kind: Any, stored: Any) -> Any:
    def load(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(_pointer(builder, arguments[0], stored), align=_ALIGNED)

        return kind(types.int64), code

    return intrinsic(load)


def _storing(kind: Any, stored: Any) -> Any:
    def store(typing: Any, address: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], _pointer(builder, arguments[0], stored), align=_ALIGNED)
            return context.get_dummy_value()

        return types.void(types.int64, kind), code

    return intrinsic(store)


def _prefetch(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        builder.call(function, [_pointer(builder, arguments[0], byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


#: Loads and stores at an address. ``inner`` functions take addresses, not arrays: passing an array counts references,
#: which costs more than the work on a row (87 ns instead of 32 for a row of 16).
load: Callable[[int], int] = _loading(types.int64, ir.IntType(64))
store: Callable[[int, int], None] = _storing(types.int64, ir.IntType(64))
load32: Callable[[int], Any] = _loading(types.uint32, ir.IntType(32))
store32: Callable[[int, Any], None] = _storing(types.uint32, ir.IntType(32))
load_float: Callable[[int], Any] = _loading(types.float32, ir.FloatType())
store_float: Callable[[int, Any], None] = _storing(types.float32, ir.FloatType())
load_double: Callable[[int], Any] = _loading(types.float64, ir.DoubleType())
#: Prefetch the cache line of an address; an invalid address does no harm.
prefetch: Callable[[int], None] = cast(Any, intrinsic(_prefetch))
