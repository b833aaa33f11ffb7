"""Jinja environment of all pages: values are escaped, and an undefined name in a template is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base import formatting

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
#: Characters not allowed in a page: control characters except line ends and tabs, lone surrogates, noncharacters.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def templates(folder: Path) -> Environment:
    """Return an environment with the templates of ``folder`` and the style sheet that all pages share."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_fit,
    )
    found.filters.update(duration=formatting.duration, size=formatting.size, percent=formatting.percent)
    return found


def _fit(value: Any) -> Any:
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value
