"""``CtrLayout``: the meaning of the files' columns, and the conversion of numeric values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError

Transform = Literal["log1p", "none"] | Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class CtrLayout:
    label: str | None
    #: label texts that mean 1; empty if the label is a number
    positive: tuple[str, ...]
    numeric: tuple[str, ...]
    #: pairs of a column and the name that salts the hashes of its values
    categorical: tuple[tuple[str, str], ...]
    transform: Transform
    fill: float
    missing: tuple[str, ...]
    seed: int

    @property
    def columns(self) -> list[str]:
        label = [] if self.label is None else [self.label]
        return [*label, *self.numeric, *(column for column, _ in self.categorical)]

    @property
    def texts(self) -> list[str]:
        """The columns that are read as text."""
        label = [self.label] if self.label is not None and self.positive else []
        return [*label, *(column for column, _ in self.categorical)]

    def check(self) -> None:
        if not self.numeric and not self.categorical:
            raise DataError("CtrFiles was given neither numeric= nor categorical= columns; name those to read")
        names = self.columns
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"column '{name}' is named twice among label, numeric and categorical; name it once")
        if not callable(self.transform) and self.transform not in ("log1p", "none"):
            raise DataError(f"transform={self.transform!r}: expected 'log1p', 'none' or a function of an array")

    def scaled(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return transformed numbers. Missing and non-finite values become ``fill``."""
        finite = np.isfinite(values)
        if callable(self.transform):
            made = np.asarray(self.transform(values), dtype=np.float32)
        elif self.transform == "log1p":
            made = np.copysign(np.log1p(np.abs(values)), values)
        else:
            made = values
        if made.shape != values.shape:
            raise DataError(
                f"transform= made an array of shape {made.shape} from one of {values.shape}; keep the shape"
            )
        return made if finite.all() else np.where(finite, made, np.float32(self.fill))


def criteo_columns(labelled: bool) -> list[str]:
    """Return the column names of Criteo's files, which have no header: label, 13 counts, 26 categories."""
    return [*(["label"] if labelled else []), *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))]


def pairs(categorical: Any) -> tuple[tuple[str, str], ...]:
    """Return columns with the names of their salts; a mapping lets columns share ids by sharing a name."""
    if isinstance(categorical, dict):
        return tuple((str(column), str(name)) for column, name in categorical.items())
    return tuple((column, column) for column in categorical)


def texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
