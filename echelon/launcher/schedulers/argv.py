"""Rebuilds command-line arguments from parsed options, for the same command on another host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def rebuild_argv(context: Any, leave_out: Iterable[str]) -> list[str]:
    """Return every option given on the command line except ``leave_out`` (names in Python). ``context`` is click's."""
    unwanted, argv = set(leave_out), []
    for param in context.command.params:
        source = context.get_parameter_source(param.name)
        if param.param_type_name == "option" and param.name not in unwanted and source.name == "COMMANDLINE":
            argv += _param_argv(param, context.params[param.name])
    return argv


def _param_argv(param: Any, value: Any) -> list[str]:
    if param.is_flag:
        return [param.opts[0] if value else param.secondary_opts[0]]
    values = value if param.multiple else [value]
    return [word for one in values for word in (param.opts[0], str(one))]
