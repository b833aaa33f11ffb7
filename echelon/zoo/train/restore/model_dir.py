"""Find the files in ``model_dir`` that parameters name."""

from __future__ import annotations

from pathlib import Path

from echelon.base.errors import UsageError
from echelon.zoo.entry import Request

_SHOWN = 8  # largest number of file names in a message


def named_file(request: Request, parameter: str, others: tuple[str, ...] = ()) -> Path:
    """Return the file that ``parameter`` names: a path below ``model_dir``, or a path of its own.

    others: endings that the parameter may omit
    """
    name = request[parameter]
    if (whole := _whole_path(request, name, others)) is not None:
        return whole
    folder = folder_of(request, parameter)
    if not name:
        raise UsageError(f"--task_type {request['task_type']} needs --{parameter}; '{folder}' holds {inside(folder)}")
    for path in (folder / f"{name}{end}" for end in ("", *others)):
        if path.exists():
            return path
    raise UsageError(f"--{parameter}: there is no '{name}' in '{folder}'; it holds {inside(folder)}")


def _whole_path(request: Request, name: str | None, others: tuple[str, ...]) -> Path | None:
    """Return the path as given if it exists and ``model_dir`` has no file of that name, else None."""
    if not name:
        return None
    ends = ("", *others)
    below = request["model_dir"] and any((Path(request["model_dir"]) / f"{name}{end}").exists() for end in ends)
    result = [Path(f"{name}{end}") for end in ends if Path(f"{name}{end}").exists()]
    return result[0] if result and not below else None


def folder_of(request: Request, parameter: str) -> Path:
    directory = request["model_dir"]
    if not directory:
        reason = f"--{parameter}" if request[parameter] else f"--task_type {request['task_type']}"
        raise UsageError(f"{reason} needs --model_dir, the folder of the weights to begin with")
    folder = Path(directory)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--model_dir '{folder}' {what}; check the path")
    return folder


def inside(folder: Path) -> str:
    """Return the names of the files in a folder as text."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return f"files that cannot be listed ({error.strerror})"
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
