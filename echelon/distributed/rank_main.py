"""What a rank runs before the user's script: ties itself to its launcher, opens its log, tells how it ended.

Started by its path, with nothing imported but the standard library: importing the package would import torch,
and for those seconds the rank would have neither its log nor its tie to the launcher.

    python worker.py LAUNCHER_PID LOG_DIR script|module PROGRAM [ARGS...]
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

#: Seconds a rank that only followed another's failure waits, so that the launcher meets the true culprit first.
LINGER = 3.0
#: Seconds for exit handlers after a failure: one may wait for ranks that will never answer.
LAST_WORDS = 5.0

#: The exit code of a rank that was asked to end and has saved (environment.REQUEUE).
LEFT = 75

#: The launcher holds these back while it starts ranks, and a process inherits what its parent holds back.
HELD_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}

#: Classes that say a peer has gone, wherever they stand in an exception's chain.
PEER_CLASSES = {"PeerLost", "DistNetworkError", "DistStoreError", "DistBackendError"}
#: Gloo and NCCL say it in plain RuntimeErrors.
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
        if os.getppid() != launcher:  # it died before we asked
            os._exit(1)


def _log_name() -> str:
    server = os.environ.get("ECHELON_SERVER")
    return f"server-{server}" if server is not None else f"rank-{os.environ['RANK']}"


def _starts_before() -> int:
    """Of this very process, where they are started again one by one; of all ranks together otherwise."""
    return int(os.environ.get("ECHELON_RESTARTS") or os.environ["TORCHELASTIC_RESTART_COUNT"])


def _open_log(path: str, attempt: int) -> BinaryIO:
    """Each rank begins its own file afresh, so that hosts sharing a directory do not erase one another's."""
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
    """Bytes to the console and to the log. For all else it is the console, a terminal where that is one."""

    def __init__(self, console: BinaryIO, log: BinaryIO) -> None:
        self._console, self.log = console, log
        self.name = console.name
        self.show = self._show  #: how bytes reach the console; a live progress bar puts itself in the way

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
    """The script as ``python script.py args`` would run it, the module as ``python -m module args``."""
    sys.argv = [program, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(program))
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _fail(error: BaseException, log: BinaryIO) -> None:
    """The story goes to the log and to the launcher, which shows the first failing rank's; then exit with 1."""
    secondary = caused_by_peer(error)
    story = _story(error)
    sys.last_value = error  # as the interpreter has it: exit handlers can see that this is no good end
    sys.stdout.flush()
    sys.stderr.flush()
    log.write(story.encode(errors="replace"))
    _record_end(error, story, secondary)
    if secondary:
        time.sleep(LINGER)
    last_words = threading.Timer(LAST_WORDS, os._exit, args=(1,))
    last_words.daemon = True
    last_words.start()
    sys.exit(1)


def caused_by_peer(error: BaseException | None) -> bool:
    """Whether this failure is only the echo of another rank's."""
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
    """Whether it is an EchelonError, whose one line says it all."""
    errors = sys.modules.get("echelon.base.errors")
    return errors is not None and isinstance(error, errors.EchelonError)


def _story(error: BaseException) -> str:
    """Return what is told of an error that ended the script."""
    trace = _from_script_on(error.__traceback__)
    if "echelon" not in sys.modules:
        return "".join(traceback.format_exception(type(error), error, trace))
    from echelon.base.user_traceback import format_error

    return format_error(error, trace)


def _place(error: BaseException) -> str:
    """Return ``train.py:41``, the place of an error of ours in the user's code."""
    from echelon.base.user_traceback import place_of

    return place_of(error)


def _from_script_on(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this file's frames and runpy's."""
    while trace is not None and _is_frame_of_ours(trace.tb_frame.f_code):
        trace = trace.tb_next
    return trace


def _is_frame_of_ours(code: CodeType) -> bool:
    return code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")


def _said(error: BaseException) -> str:
    """Its message; before it where that was, if the pipeline has noted it: long messages are cut at their end."""
    ours = "echelon: "
    places = [note.removeprefix(ours) for note in getattr(error, "__notes__", ()) if note.startswith(ours)]
    return ": ".join([*places, str(error)])


def _record_end(error: BaseException, story: str, secondary: bool) -> None:
    plain_exit, is_ours = isinstance(error, SystemExit), _is_ours(error)
    record = {
        "kind": "" if plain_exit else type(error).__name__,
        "message": "" if plain_exit else _said(error),
        "place": _place(error) if is_ours else "",
        "ours": is_ours,
        "traceback": "" if is_ours and not story.startswith("Traceback") else story,  # --traceback has it
        "secondary": secondary,
        "time": time.time(),
    }
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    with open(path + ".part", "w", errors="replace") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
