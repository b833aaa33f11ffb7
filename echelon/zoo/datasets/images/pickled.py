"""A safe reader for the pickled Python version of CIFAR's files, which executes no code from the pickle.

It builds numbers, strings, lists and dicts. The names that the pickle of a numpy array imports are replaced by classes
of this module, and any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from echelon.base.errors import DataError


def read_pickled(path: Path) -> dict[bytes, Any]:
    """Return the contents of a CIFAR file; raise DataError if it cannot be read or has arrays of other types.

    Arrays must have elements of one unsigned byte.
    """
    try:
        content = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        reason = " ".join(str(error).split())[:100]
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {reason}); fetch it again, or take the binary version"
        ) from None
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a CIFAR batch; take the binary version (data_batch_1.bin)")
    return {_as_bytes(key): _as_array(value) for key, value in content.items()}


class _Dtype:
    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _as_bytes(code)

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment, which do not matter for bytes."""


class _Array:
    def __init__(self, *_: Any) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, by_column, data = state
        if not isinstance(dtype, _Dtype) or dtype.code != b"u1":
            raise ValueError("an array of something else than bytes")
        content = data.encode("latin1") if isinstance(data, str) else data
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_column else "C")


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Replace ``_codecs.encode``, with which Python 3 pickles bytes in the old protocol."""
    return str(text).encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise ValueError(f"it asks for {module}.{name}, which no data needs")
        return _KNOWN[module, name]


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("latin1")


def _as_array(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value
