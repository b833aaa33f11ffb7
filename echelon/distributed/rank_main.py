"""The main program of a rank: ties it to its launcher, opens its log, runs the user's script and records its end.

It is started by its path and imports only the standard library: importing the package would import torch, and for
those seconds the rank would have neither its log nor its tie to the launcher.

    python rank_main.py LAUNCHER_PID LOG_DIR script|module PROGRAM [ARGS...]
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from types import CodeType, TracebackType
from typing import BinaryIO

#: Seconds that a rank waits whose failure followed another rank's, so that the launcher sees the first cause first.
LINGER = 3.0
#: Seconds for exit handlers after a failure: a handler may wait for ranks that will never answer.
LAST_WORDS = 5.0

#: The exit code of a rank that was preempted and has saved (environment.REQUEUE).
LEFT = 75

#: Signals that the launcher blocks while it starts ranks; a process inherits the blocked signals of its parent.
HELD_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}

#: Classes that mean a lost peer, anywhere in an exception's chain.
PEER_CLASSES = {"PeerLost", "DistNetworkError", "DistStoreError", "DistBackendError"}
#: Messages of plain RuntimeErrors by which Gloo and NCCL report a lost peer.
PEER_PHRASES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "ncclRemoteError",
    "remote process exited",
    "NCCL communicator was aborted",
)


def main() -> None:
    launcher, log_dir, kind, program, *args = sys.argv[1:]
    _die_with(int(launcher))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    name = _log_name()
    log = _open_log(os.path.join(log_dir, f"{name}.log"), _starts_before())
    _direct_output(log, to_console=name == "rank-0")
    faulthandler.enable(file=log)  # a segmentation fault leaves its stack in the log
    try:
        _run(kind, program, args)
    except SystemExit as end:
        if end.code not in (None, 0, LEFT):
            _record_end(end, "", secondary=False)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        _fail(error, log)


def _die_with(launcher: int) -> None:
    """Have the kernel kill this rank when the launcher dies, even by kill -9."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher died before prctl
            os._exit(1)


def _log_name() -> str:
    server = os.environ.get("ECHELON_SERVER")
    return f"server-{server}" if server is not None else f"rank-{os.environ['RANK']}"


def _starts_before() -> int:
    """Return the restarts of this process if processes are restarted one by one; otherwise those of all ranks."""
    return int(os.environ.get("ECHELON_RESTARTS") or os.environ["TORCHELASTIC_RESTART_COUNT"])


def _open_log(path: str, attempt: int) -> BinaryIO:
    """Open the log; the first attempt empties it. Each rank does so itself, because hosts may share the directory."""
    if not attempt:
        open(path, "wb").close()
    log = open(path, "ab", buffering=0)  # noqa: SIM115 - both streams and all children append
    if attempt:
        log.write(f"----- restart {attempt} -----\n".encode())
    return log


def _direct_output(log: BinaryIO, to_console: bool) -> None:
    if to_console:
        sys.stdout = _tee(sys.stdout, log)
        sys.stderr = _tee(sys.stderr, log)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)


class Tee(io.BufferedIOBase):
    """Writes bytes to the console and to the log. Other calls go to the console, which may be a terminal."""

    def __init__(self, console: BinaryIO, log: BinaryIO) -> None:
        self._console, self.log = console, log
        self.name = console.name
        self.show = self._show  #: writes bytes to the console; a live progress bar replaces it

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.log.write(data)
        self.show(bytes(data))
        return len(data)

    def restore(self) -> None:
        self.show = self._show

    def _show(self, data: bytes) -> None:
        self._console.write(data)
        self._console.flush()

    def flush(self) -> None:
        self._console.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._console.isatty()

    def fileno(self) -> int:
        return self._console.fileno()


def _tee(stream: object, log: BinaryIO) -> io.TextIOWrapper:
    assert isinstance(stream, io.TextIOWrapper)
    both = Tee(stream.buffer, log)
    return io.TextIOWrapper(both, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def _run(kind: str, program: str, args: list[str]) -> None:
    """Run a script as ``python script.py args`` does, or a module as ``python -m module args`` does."""
    sys.argv = [program, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(program))
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _fail(error: BaseException, log: BinaryIO) -> None:
    """Write the error to the log and for the launcher, which shows that of the first failing rank; exit with 1."""
    secondary = caused_by_peer(error)
    text = _traceback_text(error)
    sys.last_value = error  # as the interpreter sets it: exit handlers can see that the script failed
    sys.stdout.flush()
    sys.stderr.flush()
    log.write(text.encode(errors="replace"))
    _record_end(error, text, secondary)
    if secondary:
        time.sleep(LINGER)
    last_words = threading.Timer(LAST_WORDS, os._exit, args=(1,))
    last_words.daemon = True
    last_words.start()
    sys.exit(1)


def caused_by_peer(error: BaseException | None) -> bool:
    """Return True if this failure only follows from another rank's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "is_first_cause", False):
            return False
        if PEER_CLASSES & {cls.__name__ for cls in type(error).__mro__}:
            return True
        if isinstance(error, RuntimeError | OSError) and any(phrase in str(error) for phrase in PEER_PHRASES):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_ours(error: BaseException) -> bool:
    """Return True for an EchelonError, which is shown as one line."""
    errors = sys.modules.get("echelon.base.errors")
    return errors is not None and isinstance(error, errors.EchelonError)


def _traceback_text(error: BaseException) -> str:
    """Return the text for an error that ended the script."""
    trace = _from_script_on(error.__traceback__)
    if "echelon" not in sys.modules:
        return "".join(traceback.format_exception(type(error), error, trace))
    from echelon.base.user_traceback import format_error

    return format_error(error, trace)


def _place(error: BaseException) -> str:
    """Return ``train.py:41``, the place of an EchelonError in user code."""
    from echelon.base.user_traceback import place_of

    return place_of(error)


def _from_script_on(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this file and of runpy."""
    while trace is not None and _is_frame_of_ours(trace.tb_frame.f_code):
        trace = trace.tb_next
    return trace


def _is_frame_of_ours(code: CodeType) -> bool:
    return code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")


def _said(error: BaseException) -> str:
    """Return the error's message, preceded by the place if the pipeline noted one: long messages are cut at the end."""
    ours = "echelon: "
    places = [note.removeprefix(ours) for note in getattr(error, "__notes__", ()) if note.startswith(ours)]
    return ": ".join([*places, str(error)])


def _step() -> int:
    """Return the newest step that this process has begun; 0 if none."""
    activity = sys.modules.get("echelon.distributed.activity")
    return activity.activity.step if activity is not None else 0


def _record_end(error: BaseException, text: str, secondary: bool) -> None:
    plain_exit, is_ours = isinstance(error, SystemExit), _is_ours(error)
    record = {
        "kind": "" if plain_exit else type(error).__name__,
        "message": "" if plain_exit else _said(error),
        "place": _place(error) if is_ours else "",
        "ours": is_ours,
        "traceback": "" if is_ours and not text.startswith("Traceback") else text,  # for --traceback
        "secondary": secondary,
        "step": _step(),
        "time": time.time(),
    }
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    with open(path + ".part", "w", errors="replace") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
