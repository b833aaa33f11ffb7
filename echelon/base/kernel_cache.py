"""``cached_jit``: numba kernels whose compiled form on disk is that of exactly their sources.

numba's cache compares the date of one file, and knows nothing of what other modules contribute. So the directory of the
cache is named by a hash of all sources that go into a kernel, and of numba's version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.core.config

Function = TypeVar("Function", bound=Callable[..., Any])

config: Any = numba.core.config  # its names are set when it is loaded
_njit: Any = numba.njit


def cached_jit(sources: Sequence[Path], *signature: Any, **options: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel, or loads what was compiled from the same sources.

    Without a writable directory the kernel is compiled once in every process.

    sources:    the kernel's file first, and all files whose functions or constants it uses
    signature:  types to compile for at once; without, the first call decides
    options:    options of ``numba.njit``
    """

    def compiled(function: Function) -> Function:
        given, directory = config.CACHE_DIR, cache_directory(tuple(sources))
        try:
            config.CACHE_DIR = str(directory or "")
            return cast(Function, _njit(*signature, cache=directory is not None, **options)(function))
        except RuntimeError:  # numba cannot write there after all
            return cast(Function, _njit(*signature, **options)(function))
        finally:
            config.CACHE_DIR = given

    return compiled


@functools.cache
def cache_directory(sources: tuple[Path, ...]) -> Path | None:
    """Return the directory of what was compiled from these sources, created if needed; None if none can be.

    It lies beside the first source, where directories of its earlier contents are removed, or in the user's cache.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "echelon"
    group = f"kernels-{sources[0].stem}-"
    places = [Path(config.CACHE_DIR)] if config.CACHE_DIR else [sources[0].parent / "__pycache__", home]
    for place in places:
        own = place / f"{group}{sources_hash(sources)}"
        with contextlib.suppress(OSError):
            own.mkdir(parents=True, exist_ok=True)
            if not os.access(own, os.W_OK):
                continue
            for other in place.glob(f"{group}*") if place.name == "__pycache__" else ():
                if other != own:
                    shutil.rmtree(other, ignore_errors=True)
            return own
    return None


def sources_hash(sources: Sequence[Path]) -> str:
    """Return a hash of the contents of files, and of numba's version."""
    found = hashlib.sha256(numba.__version__.encode())
    for path in sources:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
