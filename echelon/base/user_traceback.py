"""Formats errors for users: one line with the place in user code, or a traceback without frames of echelon.

An ``EchelonError`` ends with the innermost user frame: ``distribute() has no option 'lss' ... (train.py:41)``. The
traceback of any other error keeps user frames and the last frame; frames of echelon and torch between them are counted.
``ECHELON_TRACEBACK=1``, or ``echelon run --traceback``, shows everything.

Only the standard library is imported here: echelon/distributed/rank_main.py imports this when a script fails.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from types import FrameType, TracebackType
from typing import Any

from echelon.base.environment import TRACEBACK
from echelon.base.errors import EchelonError
from echelon.base.formatting import things

_ECHELON = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: Parts of the paths of installed packages.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

#: The end of an error that already names a place because another process reported it, as with ``echelon.launch``.
_ENDS_WITH_PLACE = re.compile(r"\(\S+:\d+\)$")


def is_full_wanted() -> bool:
    """Return True if tracebacks are to be shown whole."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def message_with_place(error: BaseException) -> str:
    """Return the message with the innermost user frame at the end of its first line."""
    first, newline, rest = str(error).partition("\n")
    place = "" if _ENDS_WITH_PLACE.search(first) else place_of(error)
    return f"{first}{in_brackets(place)}{newline}{rest}"


def in_brackets(place: str) -> str:
    """Return `` (train.py:41)``, to be appended to a message."""
    return f" ({place})" if place else ""


def format_error(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return the text that is printed for an error that ended a script.

    trace:  the first frame of the traceback; by default the error's own
    """
    trace = trace or error.__traceback__
    if isinstance(error, EchelonError):
        whole = "".join(traceback.format_exception(type(error), error, trace)) if is_full_wanted() else ""
        return f"{whole}echelon: {message_with_place(error)}\n"
    shortened = traceback.TracebackException(type(error), error, trace)
    if not is_full_wanted():
        _shorten(shortened, set())
    hint = _hint(error, trace)
    return "".join(shortened.format()) + (f"echelon: {hint}\n" if hint else "")


def place_of(error: BaseException | None) -> str:
    """Return the place of the error in user code, or else that of its cause."""
    while error is not None:
        if place := user_place(error.__traceback__):
            return place
        error = error.__cause__
    return ""


def user_place(trace: TracebackType | None) -> str:
    """Return ``train.py:41`` of the innermost user frame; '' if the traceback has none."""
    frames = list(traceback.walk_tb(trace))
    theirs = [each for each in frames if _is_users(each[0])] or [each for each in frames if _is_main(each[0])]
    if not theirs:
        return ""
    frame, line = theirs[-1]
    return f"{_short(frame.f_code.co_filename)}:{line}"


def install_hook() -> None:
    """Install an excepthook that prints uncaught errors in this form; further calls do nothing."""
    previous = sys.excepthook
    if getattr(previous, "is_echelons", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, EchelonError) or (previous is sys.__excepthook__ and _has_ours(error, trace)):
            print(format_error(error, trace), end="", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    hook.is_echelons = True  # type: ignore[attr-defined]
    sys.excepthook = hook


# ---- owner of a frame ----


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith("<"):  # generated code; but the program of 'python -c' and notebook cells are the user's
        return _is_main(frame) and (frame.f_code.co_name == "<module>" or name.startswith("<ipython"))
    return not (_is_echelons(name) or _is_torchs(name) or _is_library(name))


def _is_main(frame: FrameType) -> bool:
    """Return True for code of the main program, which may be an installed package (``python -m package``)."""
    return frame.f_globals.get("__name__") == "__main__" and not _is_echelons(frame.f_code.co_filename)


def _is_echelons(filename: str) -> bool:
    return filename.startswith(_ECHELON)


def _is_torchs(filename: str) -> bool:
    home = getattr(sys.modules.get("torch"), "__file__", None)
    return home is not None and filename.startswith(os.path.dirname(home) + os.sep)


def _is_library(filename: str) -> bool:
    return any(part in filename for part in _INSTALLED) or filename.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed commands."""
    return tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "scripts"))


def _short(filename: str) -> str:
    """Return the path relative to the current directory, if it is below that."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:
        return filename
    return filename.removeprefix(here)


# ---- tracebacks without frames of echelon ----


class _Shortened(traceback.StackSummary):
    """Frames of a traceback, some of them replaced by a line that counts them."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        if frame_summary.filename:
            return super().format_frame_summary(frame_summary, **options)
        return f"  ... {frame_summary.name}\n"


def _shorten(shortened: traceback.TracebackException, seen: set[int]) -> None:
    """Leave frames out of an error and of all errors that caused it."""
    if id(shortened) in seen:
        return
    seen.add(id(shortened))
    shortened.stack = _Shortened(_without_ours(shortened.stack))
    for other in (shortened.__cause__, shortened.__context__, *(shortened.exceptions or ())):
        if other is not None:
            _shorten(other, seen)


def _without_ours(frames: traceback.StackSummary) -> Iterator[traceback.FrameSummary]:
    """Yield user frames and the last one; all frames if the last is echelon's, because that is a bug in echelon."""
    ours = [_is_echelons(frame.filename) for frame in frames]
    if not any(ours) or ours[-1]:
        yield from frames
        return
    hidden, is_explained = 0, False
    for frame, is_last in zip(frames, [*[False] * (len(frames) - 1), True], strict=True):
        if not is_last and (_is_echelons(frame.filename) or _is_torchs(frame.filename)):
            hidden += 1
            continue
        if hidden:
            yield traceback.FrameSummary("", 0, _hidden(hidden, is_explained), lookup_line=False)
            hidden, is_explained = 0, True
        yield frame


def _hidden(count: int, is_explained: bool) -> str:
    frames = things(count, "frame")
    return f"{frames} of echelon and torch{'' if is_explained else f' ({TRACEBACK}=1 shows them)'}"


def _has_ours(error: BaseException, trace: TracebackType | None) -> bool:
    """Return True if the traceback has frames to leave out or a hint to add."""
    frames = traceback.walk_tb(trace)
    return bool(_hint(error, trace)) or any(_is_echelons(frame.f_code.co_filename) for frame, _ in frames)


# ---- torch errors that are caused by wrong use of an engine ----

_NO_GRADIENT = "does not require grad and does not have a grad_fn"


def _hint(error: BaseException, trace: TracebackType | None) -> str:
    """Return a hint for ``loss.backward()`` after ``engine.step()``; '' for every other error."""
    if not isinstance(error, RuntimeError) or _NO_GRADIENT not in str(error) or not _has_stepped():
        return ""
    if any(_is_echelons(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace)):
        return ""
    return (
        "engine.step() has done backward() and the optimizer's step already, and the loss that it returns has no "
        f"gradient; leave backward() out{in_brackets(user_place(trace))}"
    )


def _has_stepped() -> bool:
    activity = sys.modules.get("echelon.distributed.activity")
    return activity is not None and activity.activity.steps > 0
