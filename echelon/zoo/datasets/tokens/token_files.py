"""Find and read the files of a data set; a missing or broken file raises DataError with one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.base.errors import DataError
from echelon.zoo.entry import Request


def folder(request: Request, what: str) -> Path:
    """Return ``dataset_dir``; raise DataError if it is missing or empty. ``what`` describes the expected contents."""
    given = request.get("dataset_dir")
    if given is None:
        raise DataError(f"--dataset_name {_name(request)} needs --dataset_dir: a folder with {what}")
    path = Path(given).expanduser()
    if not path.exists():
        raise DataError(f"--dataset_dir {given} does not exist; give a folder with {what}")
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"--dataset_dir {given} is empty; give a folder with {what}")
    return path


def find(request: Request, pattern: str, what: str) -> list[Path]:
    """Return the files of ``dataset_dir`` that match ``file_pattern``, or else ``pattern``; or the file itself."""
    path = folder(request, what)
    if path.is_file():
        return [path]
    pattern = request.get("file_pattern", pattern)
    result = sorted(file for file in path.glob(pattern) if file.is_file())
    if not result:
        raise DataError(f"no file in {path} matches '{pattern}'; there is {_some(path)}: set --file_pattern")
    return result


def find_part(request: Request, patterns: Sequence[str], what: str) -> list[Path]:
    """Return the files of one part of a data set: those of the first pattern that matches any, or an empty list."""
    path = folder(request, what)
    if path.is_file():
        raise DataError(f"--dataset_dir {path} is a file; give the folder with {what}")
    for pattern in patterns:
        if result := sorted(file for file in path.glob(pattern) if file.is_file()):
            return result
    return []


def need_part(request: Request, patterns: Sequence[str], what: str) -> list[Path]:
    result = find_part(request, patterns, what)
    if not result:
        path = folder(request, what)
        raise DataError(f"{path} has no {' or '.join(patterns)}; there is {_some(path)}: give a folder with {what}")
    return result


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or set --file_pattern") from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - len("false")
        problem = "breaks off" if cut else "is no JSON"
        raise DataError(f"{path} {problem} at character {error.pos}; download it again") from None


def read_objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a JSON list, or of a file with one object per line, each with its number from 1."""
    result: list[tuple[int, Any]]
    if path.suffix == ".json" and read_text(path).lstrip().startswith("["):
        result = list(enumerate(read_json(path), 1))
    else:
        lines = enumerate(read_text(path).split("\n"), 1)
        result = [(number, _object(path, number, line)) for number, line in lines if line.strip()]
    for number, one in result:
        if not isinstance(one, dict):
            raise DataError(f"{path}, entry {number}: expected an object with a value for each column")
    return result


def read_table(path: Path) -> list[tuple[int, list[str]]]:
    """Return the fields of each line of a tab-separated file, with line numbers from 1; quotes have no meaning."""
    lines = enumerate(read_text(path).split("\n"), 1)
    return [(number, line.rstrip("\r").split("\t")) for number, line in lines if line.strip()]


def _object(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise DataError(f"{path}, line {number} is no JSON; if it is the last line, download the file again") from None


def _some(path: Path) -> str:
    names = sorted(file.name for file in path.iterdir())
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _name(request: Request) -> str:
    return str(request.get("dataset_name", "text"))
