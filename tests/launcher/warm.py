"""Ranks and servers of a forked launcher, forked in their turn: a fresh start of each takes 1.5 s to 3 s of a core.

``fork_ranks()`` in a launcher has its ``subprocess.Popen`` make a process for rank_main.py by fork, not by exec. Such a
process is the launcher's child, with the session, environment, streams, signals and command line that exec would have
given it, and runs rank_main.py from its first line; only what is imported already is there from the start.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_exec_order = ("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo",
    "creationflags", "shell", "stdin", "_stdin", "_stdout", "stdout", "_stderr", "stderr", "restore_signals",
    "gid", "gids", "uid", "umask", "start_new_session", "process_group")  # fmt: skip
#: exit handlers of this launcher, which are none of a rank's
_handlers: list[Callable[..., Any]] = []


def fork_ranks() -> None:
    """From here on this process forks its ranks."""
    subprocess.Popen._execute_child = _fork_or_exec  # type: ignore[attr-defined]
    register = atexit.register

    def registered(handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        _handlers.append(handler)
        return register(handler, *args, **kwargs)

    atexit.register = registered


def _fork_or_exec(popen: Any, *given: Any) -> None:
    told = dict(zip(_exec_order, given, strict=True))
    if not _is_rank(told["args"]):
        _exec(popen, *given)
        return
    popen.pid = os.fork()
    if popen.pid == 0:
        _be(told)
    popen._child_created = True
    ours = [told[name] for name in ("stdin", "_stdin", "_stdout", "stdout", "_stderr", "stderr")]
    popen._close_pipe_fds(*ours)


def _is_rank(args: Any) -> bool:
    from echelon.distributed import rank_main

    if isinstance(args, str) or list(args[:2]) != [sys.executable, rank_main.__file__]:
        return False
    first, end = _place_of_arguments()
    return len(_joined(args)) <= end - first


def _be(told: dict[str, Any]) -> None:
    """Do the work of exec, of the interpreter's start and of rank_main.py in this process; it does not return."""
    code = 1
    try:
        if told["start_new_session"]:
            os.setsid()
        if told["process_group"] >= 0:
            os.setpgid(0, told["process_group"])
        _take_streams(told["stdin"], told["stdout"], told["stderr"])
        _forget_the_launcher()
        if told["env"] is not None:
            os.environ.clear()
            os.environ.update(told["env"])
        if told["cwd"] is not None:
            os.chdir(told["cwd"])
        _show(told["args"])
        code = _run(told["args"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(args: Sequence[str]) -> int:
    sys.argv = [str(word) for word in args[1:]]
    code: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)  # type: ignore[call-overload, no-any-return]


def _take_streams(*streams: int) -> None:
    for number, stream in enumerate(streams):
        if stream not in (-1, number):
            os.dup2(stream, number)
    # Numbers stay taken: an object that once had one and is collected later must not close another's.
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != null and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(null, int(name), inheritable=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _forget_the_launcher() -> None:
    subprocess.Popen._execute_child = _exec  # type: ignore[attr-defined]
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for handler in _handlers:
        atexit.unregister(handler)
    _handlers.clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # they would remove the launcher's directories
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    this = multiprocessing.current_process()  # the launcher's, a daemon: it could have no children
    this.name = "MainProcess"
    this._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]


# ---- the command line, as others see it ----


def _show(args: Sequence[str]) -> None:
    first, end = _place_of_arguments()
    ctypes.memset(first, 0, end - first)
    words = _joined(args)
    ctypes.memmove(first, words, len(words))


def _joined(args: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in args)


def _place_of_arguments() -> tuple[int, int]:
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])
