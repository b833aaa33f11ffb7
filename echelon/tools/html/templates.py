"""Templates into pages. Whatever comes from outside is escaped; a name that a template does not get is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base import formatting

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
#: Letters that no page may hold: control characters but for line ends and tabs, halves of surrogate pairs.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def templates(folder: Path) -> Environment:
    """Those of ``folder``, and the style sheet that all pages share."""
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
