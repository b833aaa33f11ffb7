"""``quiet_torch``: keeps the log of torch's C++ part off the console."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

#: The log level that shows nothing but fatal errors.
_FATAL = 3


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's C++ log: its store prints pages of stack frames for each failed call; Echelon reports one line.

    A level that the environment sets (TORCH_CPP_LOG_LEVEL) stays in effect.
    """
    level = None
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # another platform, another build
            c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    if level is None:
        yield
        return
    before, level.value = level.value, _FATAL
    try:
        yield
    finally:
        level.value = before
