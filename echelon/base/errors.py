"""What a user sees when something is wrong: one line with what was asked, what is so, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EchelonError(Exception):
    """Any failure that Echelon can explain. Shown to the user as one line, never as a traceback of ours."""


class UsageError(EchelonError, ValueError):
    """The user asked for something that does not exist or does not fit."""


class DataError(EchelonError, ValueError):
    """The data set, or a batch of it, cannot be used as asked."""


class CheckpointError(EchelonError):
    """A checkpoint could not be written, found, trusted or used."""


class Damaged(CheckpointError):
    """A checkpoint is not, or not all, what was written."""


class MismatchError(EchelonError):
    """The processes of one job were built differently."""


class LossError(EchelonError, ArithmeticError):
    """The loss is not a number that training can go on with."""


class PeerLost(EchelonError):
    """Another process of the job died or does not answer."""

    #: True where that process never came: then no other process has failed that could be the cause
    is_first_cause = False

    @classmethod
    def never_came(cls, line: str) -> PeerLost:
        """Make the error about a process that was waited for and has never been there."""
        error = cls(line)
        error.is_first_cause = True
        return error


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a slip of the pen, else the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}"
