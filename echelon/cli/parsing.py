"""Base classes of commands: any spelling of options, complete summaries, and help as wide as the terminal."""

from __future__ import annotations

import shutil
from typing import Any

from typer.core import TyperCommand, TyperGroup

from echelon.cli.option_spelling import respell
from echelon.cli.plain_values import convert_plainly
from echelon.cli.timeline_option import with_steps

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
