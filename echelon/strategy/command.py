"""``echelon explain``: from the words of a command line to a strategy and a model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from echelon.errors import EchelonError, UsageError, nearest
from echelon.strategy import files
from echelon.strategy.parts import SHORTHAND
from echelon.strategy.strategy import Strategy


def explain_words(words: Sequence[str], model: str | None, ranks: int, ranks_per_host: int | None) -> str:
    strategy = strategy_from(words)
    return strategy.explain(model_from(model) if model else None, ranks=ranks, ranks_per_host=ranks_per_host)


def strategy_from(words: Sequence[str]) -> Strategy:
    """From a file, from settings ``name=value`` or ``name.setting=value``, or from a file and settings on top."""
    paths = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(paths) > 1:
        raise UsageError(f"'{paths[0]}' and '{paths[1]}' are two strategies; give one file, and settings as name=value")
    for path in paths:
        if not Path(path).suffix:
            raise UsageError(f"'{path}' is neither a file (.yaml, .yml, .json) nor a setting such as {path}=true")
    values = files.read(paths[0]) if paths else {}
    for word in words:
        if word not in paths:
            name, _, text = word.partition("=")
            put(values, name.split("."), files.parse_value(text, word))
    return files.named(paths[0] if paths else None, lambda: Strategy.from_dict(values))


def put(values: dict[str, Any], path: list[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        values[first] = value
        return
    inner = values.get(first)
    if isinstance(inner, str | int) and not isinstance(inner, bool) and first in SHORTHAND:  # amp=fp16 amp.growth=4
        inner = {SHORTHAND[first]: inner}
    values[first] = inner if isinstance(inner, dict) else {}
    put(values[first], rest, value)


def model_from(place: str) -> nn.Module:
    """Call what ``package.module:callable`` or ``path/to/file.py:callable`` names."""
    make = callable_at(place, "--model")
    try:
        model = make()
    except EchelonError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--model '{place}' failed with {reason}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model '{place}' gave {type(model).__name__}; it must return a torch.nn.Module")
    return model


def callable_at(place: str, option: str) -> Callable[[], Any]:
    """What ``place`` names; ``option`` is what errors call it."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise UsageError(f"{option} '{place}' names no callable; write package.module:callable or file.py:callable")
    try:
        module = _from_file(Path(source), option) if source.endswith(".py") else _from_package(source, option)
    except EchelonError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{option} '{place}' failed with {reason}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UsageError(f"{option}: there is no callable '{name}' in {source}{nearest(name, known)}")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{option}: no file at '{path}'")
    sys.path.insert(0, str(path.parent.resolve()))  # as python does for a script: its neighbours can be imported
    name = f"_model_of_{path.stem}"  # not the bare stem: the file may be called types.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _from_package(name: str, option: str) -> ModuleType:
    sys.path.insert(0, "")  # the directory one is in, as under python -m
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{option}: no module '{name}'; a file is written with its .py") from None
        raise
