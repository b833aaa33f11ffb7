"""Imports objects by path: ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.base.errors import EchelonError, UsageError, nearest, one_line


def callable_at(place: str, option: str) -> Callable[..., Any]:
    """Return the callable that ``place`` names; errors name ``option``."""
    result, source, module = _object_at(place, option)
    if not callable(result):
        raise _none_there(place, option, source, module)
    return result  # type: ignore[no-any-return]


def object_at(place: str, option: str) -> Any:
    """Return the object that ``place`` names, callable or not."""
    result, source, module = _object_at(place, option)
    if result is None:
        raise _none_there(place, option, source, module)
    return result


@contextlib.contextmanager
def user_code(option: str, place: str, remedy: str = "") -> Iterator[None]:
    """Turn errors of the user's code that ``place`` names into a UsageError; errors of Echelon stay as they are."""
    try:
        yield
    except EchelonError:
        raise
    except (Exception, SystemExit) as error:
        reason = one_line(error, sys.maxsize, typed=True)
        raise UsageError(f"{option} '{place}' failed with {reason}{remedy}") from error


def _none_there(place: str, option: str, source: str, module: ModuleType) -> UsageError:
    name = place.rpartition(":")[2]
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    return UsageError(f"{option}: there is no callable '{name}' in {source}{nearest(name, known)}")


def _object_at(place: str, option: str) -> tuple[Any, str, ModuleType]:
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise UsageError(f"{option} '{place}' names no callable; write package.module:callable or file.py:callable")
    with user_code(option, place):
        module = _from_file(Path(source), option) if source.endswith(".py") else _from_package(source, option)
    return getattr(module, name, None), source, module


def _from_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{option}: no file at '{path}'")
    sys.path.insert(0, str(path.parent.resolve()))  # as python does for a script, so that it can import its siblings
    name = _module_name(path)
    known, written = sys.modules.get(name), (str(path.resolve()), path.stat().st_mtime_ns)
    if known is not None and getattr(known, "_echelon_read_from", None) == written:
        return known  # model and data set of the same file share its classes
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    module._echelon_read_from = written  # type: ignore[attr-defined]
    return module


def _module_name(path: Path) -> str:
    """Return the file's stem, which loader workers can import too; another name if a different module has the stem.

    A file may be called types.py, for example.
    """
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve():
            return path.stem
    return f"_model_of_{path.stem}"


def _from_package(name: str, option: str) -> ModuleType:
    sys.path.insert(0, "")  # the current directory, as under python -m
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{option}: no module '{name}'; a file is written with its .py") from None
        raise
