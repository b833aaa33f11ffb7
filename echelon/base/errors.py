"""Errors that users see: one line with what was given, what is wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EchelonError(Exception):
    """Any failure that Echelon can explain. It is shown as one line, without a traceback of Echelon's frames."""


class UsageError(EchelonError, ValueError):
    """An option or value does not exist or does not fit."""


class DataError(EchelonError, ValueError):
    """The data set, or a batch of it, cannot be used as requested."""


class CheckpointError(EchelonError):
    """A checkpoint could not be written, found, trusted or used."""


class Damaged(CheckpointError):
    """A checkpoint differs from what was written, or parts of it are missing."""


class MismatchError(EchelonError):
    """The processes of one job differ in their model, options or plan."""


class LossError(EchelonError, ArithmeticError):
    """The loss is not finite, so that training cannot continue."""


class PeerLost(EchelonError):
    """Another process of the job died or does not answer."""

    #: True if that process never joined: then no other process has failed that could be the cause
    is_first_cause = False

    @classmethod
    def never_came(cls, line: str) -> PeerLost:
        """Make the error about a process that was waited for and never joined."""
        error = cls(line)
        error.is_first_cause = True
        return error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for a misspelt name, otherwise the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}"


def first_line(error: BaseException, *, typed: bool = False) -> str:
    """Return the first line of an error's message, or its type if there is none.

    typed: begin with the type, as in ``OSError: message``
    """
    return _typed(str(error).strip().partition("\n")[0], error, typed)


def one_line(error: BaseException, limit: int = 200, *, typed: bool = False) -> str:
    """Return an error's whole message on one line of at most ``limit`` characters, or its type if there is none."""
    text = " ".join(str(error).split())
    return _typed(text if len(text) <= limit else text[: limit - 3] + "...", error, typed)


def _typed(text: str, error: BaseException, typed: bool) -> str:
    kind = type(error).__name__
    return f"{kind}: {text}" if typed and text else text or kind
