"""Report options of the command that are given after the script, where they go to the script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.cli.option_spelling import RENAMED, dashed
from echelon.cli.parsing import option_names, valued_options

#: Options that every program has: after the script they belong to the script.
_HELP = ("--help", "-h")
#: Without this option a job is submitted, so a script's option of this name must be given after ``--``.
DRY_RUN = "--dry-run"


def say_strayed(context: Any) -> None:
    """Print a line for options of the command that come after the script and that the script does not declare."""
    if not (words := strayed_options(context)):
        return
    args = context.params["args"]
    context.params["args"] = ["--", *args]  # launchers on other hosts get these arguments and do not repeat the line
    say(_message(context, words))


def refuse_strayed(context: Any) -> None:
    """Raise UsageError for such options, because a submission cannot be undone."""
    if words := strayed_options(context, always=(DRY_RUN,)):
        raise UsageError(_message(context, words))


def strayed_options(context: Any, always: Collection[str] = ()) -> list[str]:
    """Return options of the command that come after the script, with their values, as given.

    always: options that are returned even if the script declares them
    """
    script, args = context.params["script"], list(context.params["args"] or [])
    earlier = RENAMED.get(str(context.command.name), {})
    names = (option_names(context.command) | earlier.keys()) - {*_HELP, "-m"}
    valued, source, result = valued_options(context.command) | earlier.keys(), None, []
    for at, word in enumerate(args):
        if word == "--":
            break
        name = dashed(word).partition("=")[0]
        if name not in names:
            continue
        source = _source(script, bool(context.params["module"])) if source is None else source
        if name in always or not declares(source, name):
            result += [word, *(args[at + 1 : at + 2] if name in valued and "=" not in word else [])]
    return result


def declares(source: str, option: str) -> bool:
    """Return True if the text of a script contains the option, or a field or argument of its name."""
    name = option.lstrip("-")
    either = "[-_]".join(map(re.escape, name.split("-")))
    if not option.startswith("--"):
        return re.search(rf"""["']{re.escape(option)}["']""", source) is not None
    return re.search(rf"--{either}(?![\w-])|\b{name.replace('-', '_')}\s*[:=](?!=)", source) is not None


def _message(context: Any, words: Sequence[str]) -> str:
    script, command, given = context.params["script"], context.command_path, shlex.join(words)
    before = f"{command} {'-m ' if context.params['module'] else ''}{given} {script}"
    return (
        f"{given} stands after the script and goes to {script}; options of '{command}' come before it: '{before}' "
        f"(one of the script's own goes behind '--': '{script} -- {given}')"
    )


def _source(script: str, module: bool) -> str:
    """Return the text of the script; "" if it cannot be read on this host."""
    path: Path | None = Path(script)
    if module:
        path = _module_file(script)
    try:
        return "" if path is None else path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _module_file(name: str) -> Path | None:
    """Return the file of a module, found without importing its packages."""
    folders = ["", *sys.path]
    *packages, last = name.split(".")
    for package in packages:
        spec = PathFinder.find_spec(package, folders)
        if spec is None or spec.submodule_search_locations is None:
            return None
        folders = list(spec.submodule_search_locations)
    spec = PathFinder.find_spec(last, folders)
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    main = Path(spec.origin).with_name("__main__.py")
    return main if spec.submodule_search_locations and main.exists() else Path(spec.origin)
