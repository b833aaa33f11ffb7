"""Convert a Strategy to plain values, and read and write them as YAML and JSON; no code in a file is executed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.base.errors import UsageError, nearest
from echelon.strategy.parts import SHORTHAND

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy

T = TypeVar("T")


def to_plain(strategy: Strategy) -> dict[str, Any]:
    """Return the options that differ from the defaults: ``{"amp": "fp16", "dgc": {"sparsity": [0.99]}}``."""
    return _differing(strategy)


def write(values: dict[str, Any], path: str | Path) -> None:
    _, dump = _format(Path(path))
    try:
        Path(path).write_text(dump(values), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"strategy file '{path}' cannot be written: {error.strerror}; give another path") from None


def read(path: str | Path) -> dict[str, Any]:
    parse, _ = _format(Path(path))
    text = _text(Path(path))
    try:
        values = parse(text)
    except RecursionError:
        raise UsageError(f"strategy file '{path}' nests too deeply; options are at most three levels deep") from None
    except ValueError as error:
        raise UsageError(f"strategy file '{path}' cannot be read: {error}") from None
    if not isinstance(values, dict):
        found = "is empty" if values is None else f"holds a {type(values).__name__}"
        raise UsageError(f"strategy file '{path}' {found}; write options by name ('amp: bf16'), or {{}} for none")
    return values


def named(path: str | Path | None, make: Callable[[], T]) -> T:
    """Return the result of ``make``; if it raises UsageError, prefix the message with the path of the file."""
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{path}: {error}" if path else str(error)) from None


def parse_value(text: str, word: str) -> Any:
    """Parse one value of a command-line setting as YAML; ``word`` is the whole argument, for the error message."""
    try:
        return _parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"'{word}' cannot be read: {error}") from None


def _differing(part: Any) -> dict[str, Any]:
    given = {field.name: (getattr(part, field.name), field.default) for field in dataclasses.fields(part)}
    return {name: _plain(name, value) for name, (value, default) in given.items() if value != default}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if not dataclasses.is_dataclass(value):
        return value
    settings = _differing(value)
    whole = SHORTHAND.get(name)
    if whole and settings.keys() <= {whole}:
        return getattr(value, whole)
    return settings or True


Parse = Callable[[str], Any]
Dump = Callable[[dict[str, Any]], str]


def _format(path: Path) -> tuple[Parse, Dump]:
    formats: dict[str, tuple[Parse, Dump]] = {
        ".yaml": (_parse_yaml, _dump_yaml),
        ".yml": (_parse_yaml, _dump_yaml),
        ".json": (_parse_json, lambda values: json.dumps(values, indent=2) + "\n"),
    }
    result = formats.get(path.suffix.lower())
    if result is None:
        raise UsageError(f"strategy file '{path}' is of no known kind; name it {', '.join(formats)}")
    return result


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = [str(other) for kind in ("yaml", "yml", "json") for other in path.parent.glob(f"*.{kind}")]
        raise UsageError(f"no strategy file at '{path}'{nearest(str(path), others) if others else ''}") from None
    except OSError as error:
        raise UsageError(f"strategy file '{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"strategy file '{path}' is not text in UTF-8") from None


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_refuse_repeated_names)


def _refuse_repeated_names(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dict; raise UsageError if a name occurs twice.

    The JSON and YAML parsers would silently keep the last one.
    """
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"'{name}' is given twice; keep one")
    return dict(pairs)


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        _refuse_repeats_in(yaml.compose(text, Loader=yaml.SafeLoader), set())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{place}{' '.join(problem.split())}") from None


def _refuse_repeats_in(node: Any, seen: set[int]) -> None:
    if id(node) in seen:  # an alias may point to one of its own ancestors
        return
    seen.add(id(node))
    if isinstance(getattr(node, "value", None), list):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in node.value]
        _refuse_repeated_names([(key.value, inner) for key, inner in pairs if key is not None and key.id == "scalar"])
        for _, inner in pairs:
            _refuse_repeats_in(inner, seen)


def _dump_yaml(values: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return text
