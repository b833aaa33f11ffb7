"""Parse the docstrings of the public API, and rewrite them for mkdocstrings, which reads Google's style.

Echelon's docstrings list parameters as aligned lines, ``name: text`` with indented continuation lines, and give
examples after ``>>>``. Run as a griffe extension it rewrites both; the tests use ``parameters`` and ``examples``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import griffe

ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): +(\S.*)")
EXAMPLE = re.compile(r"(?:^(?:>>>|\.\.\.).*\n?)+", re.MULTILINE)


def parameters(text: str, names: Iterable[str]) -> dict[str, str]:
    """Return the text of each of ``names`` that the aligned list of a docstring describes."""
    return {name: about for names_of_entry, about in _entries(text.splitlines(), set(names)) for name in names_of_entry}


def examples(text: str) -> list[str]:
    """Return the source of each block of ``>>>`` lines in a docstring."""
    return [_code(block) for block in EXAMPLE.finditer(text)]


def google_style(text: str, names: Iterable[str]) -> str:
    """Return the docstring with its parameters as a Google ``Args`` section, and its examples as fenced code."""
    lines, known = text.splitlines(), set(names)
    described = parameters(text, known)
    if described:
        first = next(place for place, line in enumerate(lines) if _names(line, known))
        rest = [line for place, line in enumerate(lines) if not _belongs(lines, place, known)]
        listed = [f"    {name}: {about}" for name, about in described.items()]
        lines = [*rest[:first], "Args:", *listed, "", *rest[first:]]
    text = re.sub(r"\bdocs/(\w+)\.md\b", r"[\1.md](../\1.md)", "\n".join(lines))
    return EXAMPLE.sub(_fenced, text)


def _names(line: str, known: set[str]) -> list[str]:
    found = ENTRY.fullmatch(line)
    names = [name.lstrip("*") for name in found[1].split(", ")] if found else []
    return names if set(names) <= known else []


def _belongs(lines: list[str], place: int, known: set[str]) -> bool:
    """Return True if a line is an entry of the list or continues one."""
    while place >= 0 and lines[place].startswith("  "):
        place -= 1
    return place >= 0 and bool(_names(lines[place], known))


def _entries(lines: list[str], known: set[str]) -> Iterator[tuple[list[str], str]]:
    for place, line in enumerate(lines):
        if names := _names(line, known):
            following = itertools.takewhile(lambda more: more.startswith("  "), lines[place + 1 :])
            yield names, " ".join([line.partition(": ")[2].strip(), *(more.strip() for more in following)])


def _fenced(block: re.Match[str]) -> str:
    return f"```python\n{_code(block)}\n```\n"


def _code(block: re.Match[str]) -> str:
    return "\n".join(line[4:] for line in block[0].splitlines())


class AlignedDocstrings(griffe.Extension):
    """Rewrites the docstring of each function and class that griffe loads."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        self._rewrite(func, [each.name for each in func.parameters])

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Rewrite the docstring; for a class of fields that griffe does not know, show their constructor."""
        fields = [each for each in cls.members.values() if isinstance(each, griffe.Attribute) and each.annotation]
        if any(str(decorator.value) == "strict" for decorator in cls.decorators):
            self._construct(cls, fields, griffe.ParameterKind.keyword_only)
        elif any(str(base) == "NamedTuple" for base in cls.bases):
            self._construct(cls, fields, griffe.ParameterKind.positional_or_keyword)
        names = [each.name for each in cls.parameters] if "__init__" in cls.members else [each.name for each in fields]
        self._rewrite(cls, names)

    def _construct(self, cls: griffe.Class, fields: list[griffe.Attribute], kind: griffe.ParameterKind) -> None:
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for each in fields:
            parameters.append(griffe.Parameter(each.name, annotation=each.annotation, kind=kind, default=each.value))
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))

    def _rewrite(self, found: griffe.Object, names: list[str]) -> None:
        if found.docstring is not None:
            found.docstring.value = google_style(found.docstring.value, names)
