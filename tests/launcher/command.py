"""The real ``echelon`` command for tests, and a look at what it left running."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forked import Forked

#: Seconds after which something hangs, however busy the machine; below pytest's own limit, which tells less.
LIMIT = 150.0

#: Launchers fork their ranks too (warm.py): for tests of what a job does, not of how its ranks are started.
warm = False

Process = subprocess.Popen[str] | Forked

_started: list[Process] = []


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def first_line(self) -> str:
        return self.err.splitlines()[0] if self.err else ""


def start(*words: object, cwd: Path, **env: str) -> Forked:
    """``echelon WORDS...`` in ``cwd``, in a process group of its own."""
    process = Forked(_logging(words), cwd=cwd, env=_clean_environment() | env, warm=warm)
    _started.append(process)
    return process


def start_fresh(*words: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start as ``start`` does, with a new interpreter: it takes 2 s of a core more, and /proc shows these words."""
    return start_python("-m", "echelon", *_logging(words), cwd=cwd, **env)


def _logging(words: Sequence[object]) -> list[str]:
    """Return the words with the log directory ``log``, unless they name one: tests know where to look."""
    name, *rest = map(str, words)
    return [name, *(["--log-dir", "log"] if name == "run" and "--log-dir" not in rest else []), *rest]


def start_python(*words: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=_clean_environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def stop_all() -> None:
    """End the launchers that a failed test left running."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=LIMIT)
        else:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def finish(process: Process) -> Ended:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        others = [one for one in _started if one is not process]
        raise AssertionError(f"still running after {LIMIT} s\n{_last_words(process, *others)}") from None
    assert process.returncode is not None
    return Ended(process.returncode, out, err)


def _last_words(*processes: Process) -> str:
    """Return the last output of all launchers of the test: the one that hangs may wait for another."""
    said = []
    for process in processes:
        code = process.poll()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):  # one that was read to its end before
            out, err = process.communicate(timeout=10.0)
            said.append(f"-- it {'was running' if code is None else f'had ended with {code}'}\n{out}\n{err}")
    return "\n".join(said)


def echelon(*words: object, cwd: Path, **env: str) -> Ended:
    return finish(start(*words, cwd=cwd, **env))


def here(*words: object, cwd: Path) -> Ended:
    """Run ``echelon`` in this process, for commands that start no other. A fresh start takes 2 s."""
    from echelon.cli import main

    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["echelon", *map(str, words)]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("the command returned to Python")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def until(ready: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fail by its name when it does not."""
    deadline = time.monotonic() + LIMIT
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {LIMIT} s\n{_last_words(*_started)}")
        time.sleep(0.02)


def command_lines() -> list[str]:
    """Return the command lines of all living processes, joined by NUL; processes may end meanwhile."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((directory / "cmdline").read_bytes().decode(errors="replace"))
    return found


def processes_with(marker: str) -> list[str]:
    """The command lines of all living processes that carry the marker as an argument."""
    return [line.replace("\0", " ") for line in command_lines() if marker in line.split("\0")]


def _clean_environment() -> dict[str, str]:
    """Without what the shell that runs the tests may carry of other launchers."""
    strangers = ("PADDLE_", "SLURM_", "OMPI_", "MASTER_", "TORCHELASTIC_", "ECHELON_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(strangers) and k not in names}
    return kept | {"ECHELON_WAIT_NOTICE": "60"}  # on a busy machine a process may be late by more than 5 s
