"""Base classes of commands: any spelling of options, complete summaries, and help as wide as the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from echelon.base.recorded_steps import AFTER_WARM_UP, is_steps
from echelon.cli.option_spelling import respell

#: Type of a parameter -> (converter, what the message of an error calls the type). Newer versions of typer convert by
#: pydantic, whose import takes as long as all the rest of a command that finds a mistake: 0.11 s of CPU.
_CONVERTERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (bool, "boolean"),
    float: (float, "number"),
    int: (int, "integer"),
    list[str]: (list, "list"),
    str: (str, "text"),
    tuple[str, str]: (tuple, "pair"),
}


class PlainValue:
    """The converter of a parameter of a plain type."""

    def __init__(self, kind: Any, minimum: float | None) -> None:
        self.convert, self.name = _CONVERTERS[kind]
        self.minimum = minimum

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the converted value; () for a list that is not given. Typer calls this method."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        try:
            result = self.convert(value)
        except ValueError:
            raise typer.BadParameter(f"'{value}' is not a valid {self.name}.", ctx=ctx, param=param) from None
        if self.minimum is not None and result < self.minimum:
            raise typer.BadParameter(f"{value} is not in the range x>={self.minimum}.", ctx=ctx, param=param)
        return result


def convert_plainly(params: list[Any]) -> list[Any]:
    """Return the parameters, those of plain types with a ``PlainValue`` where typer would import pydantic."""
    for param in params:
        found = getattr(param, "type_descriptor", None)  # older versions of typer convert by click
        if found is not None and found.annotation in _CONVERTERS and found.parameter_info.max is None:
            value = PlainValue(found.annotation, found.parameter_info.min)
            param.get_runtime_param = lambda value=value: value
    return params


#: Key of the context under which a command keeps its arguments, for error messages.
WORDS = "echelon.words"


def option_names(command: Any) -> set[str]:
    """Return all names of a command's options."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def valued_options(command: Any) -> set[str]:
    """Return the names of a command's options that take a value."""
    return {name for param in command.params if not getattr(param, "is_flag", False) for name in param.opts}


class EchelonCommand(TyperCommand):
    """A command that accepts every spelling of its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        return convert_plainly(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = self.reword(args, is_last=not ctx.allow_interspersed_args)
        ctx.meta[WORDS] = tuple(words)
        return super().parse_args(ctx, words)

    def reword(self, words: list[str], *, is_last: bool) -> list[str]:
        """Return the arguments as click should read them.

        is_last: True if all arguments after the script belong to the script
        """
        return respell(words, str(self.name), option_names(self), valued_options(self), script_is_last=is_last)

    def get_short_help_str(self, limit: int = 45) -> str:
        return _summary(self)


class RunCommand(EchelonCommand):
    """The command ``echelon run``, whose ``--timeline`` may have no value, which selects steps after the warm-up."""

    def reword(self, words: list[str], *, is_last: bool) -> list[str]:
        valued = valued_options(self)
        either = valued | {"--" + name[2:].replace("-", "_") for name in valued}
        return super().reword(with_steps(words, either), is_last=is_last)


class EchelonGroup(TyperGroup):
    """A list of commands whose help is as wide as the terminal."""

    def get_params(self, ctx: Any) -> list[Any]:
        return convert_plainly(super().get_params(ctx))

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        extra.setdefault("max_content_width", shutil.get_terminal_size().columns)
        return super().make_context(info_name, args, parent, **extra)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name.replace("_", "-"))

    def get_short_help_str(self, limit: int = 45) -> str:
        return _summary(self)


def _summary(command: Any) -> str:
    """Return the whole first paragraph of a command's help; click would truncate it at the width of a line."""
    return " ".join((command.help or "").split("\n\n")[0].split())


OPTION = "--timeline"


def with_steps(words: list[str], valued: set[str]) -> list[str]:
    """Return the arguments with the default steps inserted after a bare ``--timeline``; arguments of the script stay.

    valued: options that take a value
    """
    result, at = list(words), 0
    while at < len(result) and result[at].startswith("-") and result[at] != "--":
        if result[at] == OPTION and not (at + 1 < len(result) and is_steps(result[at + 1])):
            result.insert(at + 1, AFTER_WARM_UP)
        at += 2 if result[at] in valued else 1
    return result
