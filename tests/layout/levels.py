"""The levels of the packages: a package imports from lower levels only."""

from __future__ import annotations

#: From the lowest level to the highest. Packages of one level do not import each other. ``api`` includes ``__init__``,
#: and ``cli`` includes ``__main__``.
LEVELS = (
    ("base",),
    ("distributed", "strategy", "nn"),
    ("checkpoint", "data", "optim"),
    ("plan", "construction"),
    ("observability",),
    ("parallel", "parameter_server"),
    ("launcher", "fastpath", "hf"),
    ("engine", "planner"),
    ("api",),
    ("tools", "zoo"),
    ("cli",),
)
