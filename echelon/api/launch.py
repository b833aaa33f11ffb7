"""``launch(fn, procs=2)``: runs a function on several processes of one job, from a notebook or any Python session.

Processes are forked, so functions of notebook cells and the data in their closures need no pickling.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import faulthandler
import gc
import inspect
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.base.environment import AGENT_STORE, LAUNCHED, LOOPBACK, RESTART_COUNT
from echelon.base.errors import EchelonError, UsageError
from echelon.base.parent_death import die_with
from echelon.base.user_traceback import format_error
from echelon.distributed import world

#: Seconds to wait for other ranks after the first failure, because the rank that caused it may report later.
LINGER = 1.0
#: Stack frames of this file above the user's function.
OURS = 2
#: Bytes of output kept for each rank except rank 0, shown if the rank fails.
KEPT = 64 * 1024


class LaunchError(EchelonError):
    """A rank of ``launch`` raised or died."""


def launch(fn: Callable[..., Any], *args: Any, procs: int | None = None, **named: Any) -> list[Any]:
    """Call ``fn(*args, **named)`` on ``procs`` processes of one job and return their results in rank order.

    fn:    function to call on every process
    args:  positional arguments of ``fn``
    procs: number of processes; default: one per GPU, at least 2
    named: keyword arguments of ``fn``

    The output of rank 0 is shown here. If a rank fails, the other ranks are killed, and ``LaunchError`` contains its
    traceback. Each rank computes with one thread.

    >>> ranks = echelon.launch(echelon.rank, procs=2)
    """
    count = procs if procs is not None else max(2, torch.cuda.device_count())
    _refuse(count)
    _refuse_call(fn, args, named)
    with socket.create_server((LOOPBACK, 0)) as listener, _ended_in_any_case() as ranks:
        for rank in range(count):
            with _uninterrupted(), _collected_by_the_caller_alone():
                ranks.append(_start(rank, count, listener, lambda: fn(*args, **named)))
        store = TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=world.DEFAULT_TIMEOUT),
            master_listen_fd=os.dup(listener.fileno()),
        )
        results = _follow(ranks)
        del store  # the store must live until the last rank is done
    return results


def _refuse_call(fn: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not callable(fn):
        raise UsageError(f"launch({fn!r}): give a function, and its arguments after it")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise UsageError(f"launch(): {name}{signature} does not take these arguments: {error}") from None


def _refuse(procs: int) -> None:
    if type(procs) is not int or procs < 1:
        raise UsageError(f"launch(procs={procs!r}): give a whole number, 1 or more")
    if sys.platform != "linux":
        raise UsageError(f"launch() forks processes, which is safe on Linux alone, and this is {sys.platform}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            "launch() forks this process, and a GPU that is in use here cannot be used by its children; restart the "
            "kernel and make tensors and models on the GPU only inside the function"
        )
    if (world.is_initialized() and world.current().size > 1) or os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("launch() was called on a rank of a job; call it from a process of its own")


@dataclass
class _LaunchedRank:
    number: int
    pid: int
    result: Connection
    output: Connection
    printed: bytearray = field(default_factory=bytearray)
    letters: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf8")("replace"))
    ended: _RankOutcome | None = None


@dataclass(frozen=True)
class _RankOutcome:
    value: Any = None
    error: str | None = None
    time: float = 0.0


# ---- in the rank ----


def _start(number: int, count: int, listener: socket.socket, call: Callable[[], Any]) -> _LaunchedRank:
    result, telling = Pipe(duplex=False)
    output, printing = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():  # other threads may hold locks, but ranks use no streams or pools of the parent
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        result.close()
        _be(number, count, parent, listener, telling, printing, call)
    telling.close()
    printing.close()
    return _LaunchedRank(number, pid, result, output)


def _be(
    number: int,
    count: int,
    parent: int,
    listener: socket.socket,
    telling: Connection,
    printing: Connection,
    call: Callable[[], Any],
) -> NoReturn:
    """Run the rank in the forked process and exit it; never return into the caller's program."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller kills all ranks when it is interrupted
        _inherit_no_exit_handlers()
        _direct_output(printing)
        _take_place(number, count, listener)
        end = _called(call)
        code = 1 if end.error else 0
        sys.stdout.flush()
        telling.send_bytes(pickle.dumps((end.value, end.error, end.time)))
        if not code:
            atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _direct_output(printing: Connection) -> None:
    """Redirect stdout and stderr, including output of native code, into the pipe.

    The streams of a notebook belong to threads that were not forked.
    """
    for number in (1, 2):
        os.dup2(printing.fileno(), number)
    faulthandler.enable(1)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115 - open until process exit
    sys.stderr = sys.stdout
    setattr(sys, "__stdout__", sys.stdout)  # noqa: B010 - a progress bar writes there; "final" to type checkers


def _take_place(number: int, count: int, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    values = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, AGENT_STORE: True}
    for name, value in {**values, **store, LAUNCHED: True}.items():
        os.environ[name] = str(value)
    os.environ.pop(RESTART_COUNT, None)
    world.forget()
    gc.enable()
    torch.set_num_threads(1)  # the threads of the parent's pool were not forked; waiting for them would hang


def _called(call: Callable[[], Any]) -> _RankOutcome:
    try:
        value = call()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return _RankOutcome()
        return _RankOutcome(error=_error_text(error), time=time.time())
    try:
        pickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        what = f"it returned {kind}, which cannot be sent back ({error}); return numbers, dicts or tensors on the CPU"
        return _RankOutcome(error=what, time=time.time())
    return _RankOutcome(value)


def _error_text(error: BaseException) -> str:
    """Format the error with its traceback from the user's function on, without the frames of this file."""
    above = error.__traceback__
    for _ in range(OURS):
        above = above.tb_next if above is not None else None
    return format_error(error, above).rstrip().removeprefix("echelon: ")


def _inherit_no_exit_handlers() -> None:
    """Remove the caller's exit handlers, for example a notebook's that saves its history.

    The handler of multiprocessing stays, because DataLoader workers need it.
    """
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


# ---- in the caller ----


@contextlib.contextmanager
def _ended_in_any_case() -> Iterator[list[_LaunchedRank]]:
    """Kill all ranks on exit, whether the call returns, raises or is interrupted."""
    ranks: list[_LaunchedRank] = []
    try:
        yield ranks
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.result.close()
            rank.output.close()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer SIGINT until exit: an interrupt between the fork and recording its pid would leave an orphan process."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # no Python handler runs here
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _collected_by_the_caller_alone() -> Iterator[None]:
    """Freeze the heap around a fork, so that a rank never garbage-collects objects of the caller.

    A destructor that joins a thread (a process group, an RPC client) hangs or crashes in a process that was forked
    without the thread. Frozen pages also stay shared.
    """
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _follow(ranks: list[_LaunchedRank]) -> list[Any]:
    """Show the output of rank 0 until all ranks have returned or one has failed, and return their results.

    Raises ``LaunchError`` with the first failure.
    """
    deadline: float | None = None
    sources: dict[Any, _LaunchedRank] = {end: rank for rank in ranks for end in (rank.result, rank.output)}
    while sources:
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(sources), limit)
        if not ready:
            break
        for source in ready:
            if not _take(sources[source], source):
                del sources[source]
        if deadline is None and (all(rank.ended for rank in ranks) or any(_failed(rank) for rank in ranks)):
            deadline = time.monotonic() + LINGER
    _raise_first(ranks)
    return [rank.ended.value if rank.ended else None for rank in ranks]


def _take(rank: _LaunchedRank, source: Any) -> bool:
    """Read from this pipe of a rank; return True if more data may follow."""
    if source is rank.output:
        data = os.read(source.fileno(), 1 << 16)
        _show(rank, data)
        return bool(data)
    try:
        data = source.recv_bytes()
    except (EOFError, OSError):  # the process died before or while it sent its result
        rank.ended = rank.ended or _RankOutcome(error=_death(rank))  # time 0: not a consequence, so it counts as first
        return False
    rank.ended = _unpacked(data)
    return True


def _unpacked(data: bytes) -> _RankOutcome:
    try:
        return _RankOutcome(*pickle.loads(data))  # the data comes from our own child process
    except Exception as error:
        what = f"its result cannot be unpickled here ({type(error).__name__}: {error})"
        return _RankOutcome(error=f"{what}; return numbers, dicts or tensors on the CPU", time=time.time())


def _show(rank: _LaunchedRank, data: bytes) -> None:
    if rank.number == 0:
        sys.stdout.write(rank.letters.decode(data, final=not data))  # a read may end within a character
        sys.stdout.flush()
    else:
        rank.printed = (rank.printed + data)[-KEPT:]


def _death(rank: _LaunchedRank) -> str:
    _, status = os.waitpid(rank.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _failed(rank: _LaunchedRank) -> bool:
    return rank.ended is not None and rank.ended.error is not None


def _raise_first(ranks: list[_LaunchedRank]) -> None:
    failed = [rank for rank in ranks if _failed(rank)]
    if not failed:
        return
    first = min(failed, key=lambda rank: rank.ended.time if rank.ended else 0.0)
    assert first.ended is not None
    said = first.printed.decode(errors="replace").rstrip()
    line = f"rank {first.number} of {len(ranks)} failed: {first.ended.error}"
    raise LaunchError(f"{line}\nits output:\n{said}" if said else line)
