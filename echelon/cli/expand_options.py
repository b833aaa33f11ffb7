"""``expand_options``: a command whose options are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a keyword argument for each field of its dataclass, in the place of the dataclass."""
    signature = inspect.signature(command, eval_str=True)
    types: dict[str, Any] = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    name = next(name for name, found in types.items() if is_dataclass(found))
    fields = inspect.signature(types[name], eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        given[name] = types[name](**{field: given.pop(field) for field in fields})
        command(**given)

    expanded = [f for key, p in signature.parameters.items() for f in (fields.values() if key == name else [p])]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in expanded]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    return run
