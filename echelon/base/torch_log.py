"""Keep the log of torch's C++ part off the console."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

#: The log levels that show errors, and nothing but fatal errors.
ERRORS, _FATAL = 2, 3


def log_level() -> ctypes.c_int | None:
    """Return torch's C++ log level, which may be changed; None if the environment sets it (TORCH_CPP_LOG_LEVEL)."""
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # another platform, another build
            c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            return ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    return None


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's C++ log: its store prints pages of stack frames for each failed call, Echelon one line."""
    level = log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, _FATAL
    try:
        yield
    finally:
        level.value = before
