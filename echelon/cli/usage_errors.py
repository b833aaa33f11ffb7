"""Format parser errors as one line with a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any

from echelon.base.errors import nearest
from echelon.cli.option_spelling import dashed
from echelon.cli.other_launchers import is_foreign, translate
from echelon.cli.parsing import WORDS, option_names, valued_options

#: Commands whose options may come before and after the script.
WITH_SCRIPTS = ("memory", "plan", "verify")
#: Commands of other tools -> the equivalent commands of echelon.
ELSEWHERE = {"launch": "run", "test": "doctor", "env": "doctor", "estimate-memory": "memory", "models": "zoo list"}
#: (pattern in the parser's message about a value, description of the expected value)
_WANTED = (
    (r"greater than or equal to (-?[\d.]+)|x>=(-?[\d.]+)", "{} or more"),
    (r"greater than (-?[\d.]+)|x>(-?[\d.]+)", "more than {}"),
    (r"integer", "a whole number"),
    (r"number|float", "a number"),
    (r"boolean", "true or false"),
)


def explain(error: Any) -> str:
    """Return the parser's error as one line, with the nearest name for an option or command that does not exist."""
    kind = type(error).__name__
    command: Any = error.ctx.command if error.ctx else None
    if kind == "NoArgsIsHelpError":
        return (
            f"the command is missing; known: {', '.join(sorted(command.commands))} (see '{error.ctx.command_path} "
            "--help')"
        )
    if kind == "NoSuchOption":
        return _no_option(error, command)
    message = " ".join(error.format_message().split()).rstrip(".")
    if message.startswith("No such command"):
        return _no_command(message.split("'")[1], command)
    if kind == "MissingParameter" and error.ctx is not None:
        return f"{_uncapped(message)}; {_usage(error.ctx)}"
    if kind == "BadParameter" and getattr(error, "param", None) is not None:
        return _bad_value(error, message)
    if kind == "BadOptionUsage" and "requires an argument" in message:
        return f"{error.option_name} needs a value"
    return _uncapped(message)


def _usage(ctx: Any) -> str:
    """Return ``usage: echelon run [OPTIONS] SCRIPT [ARGS]...``, alike for all versions of typer.

    Newer ones add braces, and some leave out the dots.
    """
    usage = re.sub(r"\{(\w+)\}", r"\1", _uncapped(" ".join(ctx.get_usage().split())))
    return re.sub(r"\[ARGS\](?!\.)", "[ARGS]...", usage)


def nearest_option(name: str, known: Collection[str]) -> str:
    """Return ``; did you mean '--x'?``; names are compared without the dashes, which all options share."""
    bare = {each.lstrip("-"): each for each in known if each.startswith("--")}
    close = difflib.get_close_matches(dashed(name).lstrip("-"), bare, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{bare[close[0]]}'?"
    return nearest(name, bare.values()) if bare else ""


def _no_option(error: Any, command: Any) -> str:
    ctx, words = error.ctx, error.ctx.meta.get(WORDS, ())
    called, name = ctx.command_path, _as_written(error.option_name, words)
    if command.name == "run" and is_foreign(name):
        return translate(called, words, valued_options(command))
    known = option_names(command)
    if called.endswith("doctor"):
        known |= {"--checkpoint", "--json", "--quick", "--save"}
    if called.startswith("echelon submit ") and dashed(name) in _options_of_run():
        return f"no option '{name}' for '{called}'; it is one of 'echelon run': give it as --run '{name} ...'"
    after = " (the script's own go behind '--')" if command.name in WITH_SCRIPTS else ""
    return f"no option '{name}' for '{called}'{nearest_option(name, known)}{after}"


def _options_of_run() -> set[str]:
    from echelon.cli.app import run_command

    return option_names(run_command())


def _no_command(name: str, command: Any) -> str:
    if name in ELSEWHERE:
        return f"no command '{name}'; here it is 'echelon {ELSEWHERE[name]}'"
    return f"no command '{name}'{nearest(name, command.commands)}"


def _bad_value(error: Any, message: str) -> str:
    names = (*error.param.opts, *error.param.secondary_opts)
    name, value = _given(names, error.ctx.meta.get(WORDS, ()) if error.ctx else ())
    if name is None:
        return _uncapped(message)
    if name in ("--servers", "--workers") and ":" in value:  # the syntax of fleetrun
        return f"{name} {value}: expected a number; endpoints are named by --pservers HOST:PORT,... and --trainers N"
    for pattern, wanted in _WANTED:
        if found := re.search(pattern, message.partition(":")[2]):
            limit = next((each for each in found.groups() if each), "")
            return f"{name} {value}: expected {wanted.format(limit)}"
    return f"{name} {value}: {_uncapped(message.partition(': ')[2] or message)}"


def _given(names: Collection[str], words: Collection[str]) -> tuple[str | None, str]:
    """Return the one of these options that was given, and its value."""
    listed = list(words)
    for at, word in enumerate(listed):
        name, equals, value = dashed(word).partition("=")
        if name in names and (equals or at + 1 < len(listed)):
            return name, value if equals else listed[at + 1]
    return None, ""


def _as_written(name: str, words: Collection[str]) -> str:
    written = (word.partition("=")[0] for word in words)
    return next((word for word in written if dashed(word) == dashed(name)), name)


def _uncapped(message: str) -> str:
    return message[:1].lower() + message[1:]
