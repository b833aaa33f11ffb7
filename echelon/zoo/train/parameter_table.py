"""Print the parameters as a table for docs/zoo.md: ``python -m echelon.zoo.train.parameter_table``."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from echelon.base.config import describe
from echelon.zoo.train.parameters import PARAMETERS


def markdown() -> str:
    lines = ["| group | name | type, default | meaning |", "|---|---|---|---|"]
    for group, members in groupby(PARAMETERS, key=lambda parameter: parameter.group):
        for parameter in members:
            kind = _typed(parameter.type, parameter.default)
            lines.append(f"| {group} | `{parameter.name}` | {kind} | {parameter.meaning} |")
    return "\n".join(lines)


def _typed(kind: Any, default: Any) -> str:
    words = "any" if kind is Any else describe(kind).replace("|", "\\|").replace(" or None", "")
    return words if default is None else f"{words}, `{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(markdown())
