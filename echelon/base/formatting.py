"""Formats seconds, bytes, percentages and counts as short text, and tables as aligned text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def duration(seconds: float) -> str:
    """Return seconds with a unit and three digits: ``1.23 s``, ``12.3 ms``, ``45.6 us``."""
    units = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
    unit = next((unit for unit, scale in units.items() if seconds * scale >= 0.9995), "ns" if seconds else "s")
    return f"{_digits(seconds * units[unit])} {unit}"


def unit_for(largest: float) -> tuple[str, float]:
    """Return the unit for a table whose largest entry is ``largest`` bytes, and the bytes of that unit."""
    return ("GB", 1e9) if largest >= 1e8 else ("MB", 1e6)


def amount(value: float, unit: float) -> str:
    """Return the number of units without the unit's name; a value above 0 is never shown as 0."""
    value /= unit
    return "<0.01" if 0 < value < 0.005 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def size(amount: float) -> str:
    """Return bytes with a unit: ``80 GB``, ``1.5 MB``."""
    return _scaled(amount, {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12})


def count(amount: float) -> str:
    """Return a count in words: ``175 billion``, ``1.2 million``, ``512``."""
    return _scaled(amount, {"": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}).strip()


def things(number: int, thing: str) -> str:
    """Return a count with its noun: ``1 server``, ``2 servers``, ``3 batches``."""
    return f"{number} {thing}{'' if number == 1 else 'es' if thing.endswith('ch') else 's'}"


def rate(amount: float) -> str:
    return _digits(amount)


def percent(part: float, *, signed: bool = False) -> str:
    """Return ``12.3%``; signed values drop digits that do not matter: ``+14%``, ``-0.4%``, ``0%``."""
    if not signed:
        return f"{part:.1%}"
    if abs(part) < 0.0005:
        return "0%"
    return f"{part:+.1%}" if abs(part) < 0.0995 else f"{part:+.0%}"


def brief(value: object, limit: int = 60) -> str:
    """Return ``repr(value)`` on one line of a message, cut: a wrong value may be a whole file."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= limit else f"{text[:limit]}..."


def text_table(
    rows: Sequence[Sequence[str]], *, right: Container[int] = (), indent: int = 0, width: int | None = None
) -> list[str]:
    """Return rows as lines with aligned columns, without blanks at the ends of lines.

    right: indices of the right-aligned columns
    width: longest line; where lines would be longer, the cells of the widest column are cut
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = indent + sum(widths) + 2 * (len(widths) - 1) - width if width else 0
    if excess > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(8, widths[widest] - excess)
    places = [f"{'>' if column in right else '<'}{size}.{size}" for column, size in enumerate(widths)]
    return [" " * indent + "  ".join(map(format, row, places)).rstrip() for row in rows]


def _scaled(amount: float, units: dict[str, float]) -> str:
    unit, scale = next(iter(units.items()))
    for name, value in units.items():
        if amount >= 0.9995 * value:
            unit, scale = name, value
    return f"{_digits(amount / scale)} {unit}"


def _digits(value: float) -> str:
    """Return three significant digits, and always all digits before the point."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
