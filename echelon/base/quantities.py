"""Parses and prints quantities with units: ``80 GB``, ``200 Gb/s``, ``5 us``, ``312 TFLOP/s``."""

from __future__ import annotations

import math
import re
from typing import Literal

from echelon.base.errors import UsageError

Kind = Literal["bytes", "bytes/s", "seconds", "FLOP/s"]

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
#: b stands for bits and B for bytes.
_UNITS: dict[Kind, dict[str, float]] = {
    "bytes": {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()},
    "bytes/s": {
        f"{prefix}{unit}{end}": size * part
        for prefix, size in (_PREFIXES | _BINARY).items()
        for unit, part in (("B", 1.0), ("b", 1 / 8), ("bit", 1 / 8))
        for end in ("/s", "ps", "")
    },
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "FLOP/s": {f"{prefix}{unit}": size for prefix, size in _PREFIXES.items() for unit in ("FLOP/s", "FLOPS", "FLOPs")},
}
_EXAMPLES: dict[Kind, str] = {
    "bytes": "80 GB or 40 GiB",
    "bytes/s": "100 Gb/s, 8x200 Gb/s or 300 GB/s",
    "seconds": "5 us",
    "FLOP/s": "312 TFLOP/s",
}


def quantity(text: str | float, kind: Kind, where: str) -> float:
    """Return ``text`` in the base unit; a plain number is in it already. ``where`` names the value in errors."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = float(text)
    else:
        value = _parsed(str(text), kind, where)
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{where}: {text} is no {kind} above 0; write one such as {_EXAMPLES[kind]}")
    return value


def _parsed(text: str, kind: Kind, where: str) -> float:
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*", text)
    unit = match and (1.0 if not match[3] else _unit(match[3], kind))
    if not match or unit is None or match[2].count(".") > 1:
        raise UsageError(f"{where}: '{text}' is no quantity in {kind}; write one such as {_EXAMPLES[kind]}")
    return int(match[1] or 1) * float(match[2]) * unit


def _unit(text: str, kind: Kind) -> float | None:
    units = _UNITS[kind]
    if text in units:
        return units[text]
    close = {value for name, value in units.items() if name.lower() == text.lower()}
    return close.pop() if len(close) == 1 else None  # gb/s may be bits or bytes


def show(value: float, kind: Kind) -> str:
    """Return the value with a fitting unit: ``312 TFLOP/s``, ``74.5 GiB``, ``1.02 us``."""
    if kind == "seconds":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]
    elif kind == "bytes":
        steps = [(1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "B")]
    else:
        base = "B/s" if kind == "bytes/s" else "FLOP/s"
        steps = [(size, f"{prefix}{base}") for prefix, size in reversed(_PREFIXES.items())]
    size, unit = next(((size, unit) for size, unit in steps if value >= size), steps[-1])
    scaled = value / size
    return f"{scaled:.0f} {unit}" if scaled >= 99.95 else f"{scaled:.3g} {unit}"
