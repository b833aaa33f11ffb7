"""``StatusReporter``: a thread of each rank that reports the rank's status once a second.

It has a connection of its own, because torch's may be waiting for another rank. Without ``echelon run``, the thread of
rank 0 also runs the stall detector, and every rank prints its reports.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.base.environment import LOG_DIR, RESTART_COUNT, STALL, STALL_JUDGE, RankInfo
from echelon.base.errors import UsageError
from echelon.distributed.activity import activity, format_ranks
from echelon.observability.stall.detector import StallDetector, log_stall_reports, period
from echelon.observability.stall.rank_status import RankStatus, RankWait, printable

if TYPE_CHECKING:
    from echelon.distributed.world import World

#: Default of the seconds that a rank may be late.
DEFAULT = 60.0
#: Most frames of a stack in a report, counted from the innermost.
FRAMES = 30
#: Key prefix of the reports in the store of the ranks.
PREFIX = "echelon/watch"

_reporter: StatusReporter | None = None


def stall_limit() -> float:
    """Return the seconds after which a late rank is reported; 0 disables stall detection.

    Raises ``UsageError`` if the environment variable is not a valid number.
    """
    text = os.environ.get(STALL, "")
    try:
        limit = float(text or DEFAULT)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise UsageError(f"{STALL} must be a number of seconds (0: no stall watch), but it is '{text}'")
    return limit


def report(world: World) -> None:
    """Start the reporter once per process, unless the job has one rank or stall detection is disabled."""
    global _reporter  # noqa: PLW0603 - a process belongs to one job
    limit = stall_limit()
    if _reporter is None and limit > 0 and world.control is not None:
        _reporter = StatusReporter(world.place, limit)
        _reporter.start()
        atexit.register(stop)


def stop() -> None:
    """Report that this rank has left, and stop the reporter."""
    global _reporter
    reporter, _reporter = _reporter, None
    if reporter is not None:
        reporter.stop()


class StatusReporter(threading.Thread):
    def __init__(self, place: RankInfo, limit: float) -> None:
        super().__init__(name="echelon-reporter", daemon=True)
        self._place, self._limit = place, limit
        self._main = threading.main_thread().ident
        self._done = threading.Event()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._beat = 0
        self._tables = 0  # number of stall reports printed so far
        self._detector: StallDetector | None = None

    def stop(self) -> None:
        """Stop the thread and wait for it, because a thread inside torch while Python exits can crash the process."""
        self._done.set()
        self.join(2.0)

    def run(self) -> None:
        try:
            store = _open(self._place)
            is_judge = STALL_JUDGE not in os.environ
            if is_judge and self._place.rank == 0:
                self._detector = StallDetector(store, self._place.world_size, self._limit, ends=False)
            while True:
                self._serve_requests(store)
                if is_judge:
                    self._judge(store)
                    self._show(store)
                if self._done.wait(period(self._limit)):
                    break
            self._publish(store, left=True)
        except RuntimeError:  # the store has ended, and so have its readers
            pass

    def _serve_requests(self, store: Store) -> None:
        self._publish(store)
        request = f"ask/{self._place.rank}"
        if store.check([request]):
            store.delete_key(request)
            store.set(f"stack/{self._place.rank}", stack_of(self._main))

    def _publish(self, store: Store, left: bool = False) -> None:
        self._beat += 1
        store.set(f"status/{self._place.rank}", self.status(left).to_json())

    def status(self, left: bool = False) -> RankStatus:
        now, own = time.monotonic(), activity
        return RankStatus(
            rank=self._place.rank,
            host=self._host,
            pid=self._pid,
            beat=self._beat,
            step=own.step,
            phase=own.phase,
            seconds=now - own.phase_since,
            call=own.call,
            wait=_wait(now),
            counts={f"{call}|{ranks}": count for (call, ranks), count in dict(own.counts).items()},
            cpu=time.process_time() - time.thread_time() + _cpu_of_children(self._pid),
            io=_bytes_moved(),
            busy=dict(own.busy),
            steps=own.steps,
            alike=format_ranks(own.alike),
            left=left,
        )

    def _judge(self, store: Store) -> None:
        if self._detector is None:
            return
        ruling, lines = self._detector.examine(time.monotonic(), {})
        log_stall_reports(ruling, lines)
        for text in ([ruling.table] if ruling else []) + [f"echelon: {line}" for line in lines]:
            store.set(f"table/{int(store.add('tables', 1)) - 1}", text)

    def _show(self, store: Store) -> None:
        while store.check([key := f"table/{self._tables}"]):
            print(bytes(store.get(key)).decode(errors="replace"), file=sys.stderr, flush=True)
            self._tables += 1


def _open(place: RankInfo) -> Store:
    store = TCPStore(
        place.master_addr, place.master_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    # Under other launchers a store, with old reports in it, may survive restarts.
    attempt = "" if LOG_DIR in os.environ else f"-{os.environ.get(RESTART_COUNT, '0')}"
    return PrefixStore(PREFIX + attempt, store)


def _wait(now: float) -> RankWait | None:
    wait = activity.wait
    if wait is None:
        return None
    return RankWait(wait.call, printable(wait.what), str(wait.ranks), wait.number, now - wait.since)


def stack_of(thread: int | None) -> str:
    """Return the stack of a thread, innermost frame last, without the frames that start the user's script."""
    frame = _within(sys._current_frames().get(thread or 0))
    frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    while len(frames) > 1 and _starts_scripts(frames[0].filename):
        del frames[0]
    return "".join(traceback.format_list(frames))


def _within(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside of ``distributed/activity.py``."""
    while frame is not None and frame.f_code.co_filename.endswith("distributed/activity.py"):
        frame = frame.f_back
    return frame


def _starts_scripts(filename: str) -> bool:
    return "runpy" in filename or filename.endswith(os.path.join("distributed", "rank_main.py"))


def _cpu_of_children(pid: int) -> float:
    """Return the CPU seconds of child processes, such as DataLoader workers."""
    ticks = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    for child in children:
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written: a rank that fetches data uses little CPU."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, IndexError, ValueError):
        return 0
