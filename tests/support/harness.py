"""Real ranks for tests: ``losses = run(train, ranks=2, strategy=...)``.

Each rank is a process of its own with its own sockets, forked from a server that has torch imported already
(0.2 s a rank instead of a fresh start). ``run`` returns what every rank returned, in rank order; a rank that
raises, dies or outlives the time limit fails the test with its name and traceback.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("ECHELON_WAIT_NOTICE", "60")  # on a busy machine a rank may be late by more than 5 s
os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the fork server: ranks share two cores
#: One for all tests: the last list of preloads holds for all of them.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("torch", "numpy", "pytest", "echelon.api.public", "torch.distributed"),
        *(
            "echelon.parameter_server.server.process",
            "echelon.parameter_server.worker.session",
            "echelon.cli",
            "echelon.launcher.launch_job",
            "echelon.launcher.role_assignment",
        ),
        # what a launcher, a checkpoint, a spread model import when they come to it: 0.1 s to 0.4 s of each process
        *("pydantic.type_adapter", "jinja2", "echelon.launcher.schedulers.detect_scheduler", "encodings.idna"),
        *("torch.distributed.checkpoint", "safetensors.torch", "echelon.checkpoint.writer", "echelon.checkpoint"),
        *(
            "echelon.parallel.zero.split_sums",
            "echelon.parallel.pipeline",
            "echelon.plan.partition",
            "echelon.observability.runlog.rank_log",
        ),
        "torch._subclasses.schema_check_mode",
        "torch.fx.experimental.symbolic_shapes",  # 2 s, which the first backward() with a gradient takes on each rank
        "torch._dynamo",  # 1 s, which the first optimizer takes on each rank
    ]
)


#: By this name pytest's workers know who they are, and their ranks whose they are.
WORKER = "PYTEST_XDIST_WORKER"
#: Environment of the ranks; a test that starts its processes otherwise removes it.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
#: Seconds after which ranks hang, however busy the machine.
LIMIT = 150.0


#: Set by `make test-gpu`: ranks train on a GPU.
ON_GPU = os.environ.get("ECHELON_TEST_GPU") == "1"


def tolerance_of(limit: float) -> float:
    """Return the difference to allow: on a GPU, kernels of another batch size add in another order, and more cannot be
    asked of fp32 than 1e-5."""
    return max(limit, 1e-5) if ON_GPU else limit


class RankFailed(AssertionError):
    """At least one rank did not return."""


@dataclass(frozen=True)
class Died:
    """Result of a rank that is killed instead of returning."""

    exitcode: int


@dataclass(frozen=True)
class Raised:
    """Result of a rank that raises."""

    kind: str
    line: str
    trace: str


def run(rank_main: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = LIMIT, **kwargs: Any) -> list[Any]:
    """Call ``rank_main(*args, **kwargs)`` on ``ranks`` processes of one job; their results in rank order."""
    results = run_raw(rank_main, *args, ranks=ranks, timeout=timeout, **kwargs)
    failed = {rank: end for rank, end in enumerate(results) if isinstance(end, Raised | Died)}
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {_story(end)}" for rank, end in failed.items()))
    return results


def errors(
    rank_main: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = LIMIT, **kwargs: Any
) -> list[str]:
    """Run jobs that must fail and return every rank's one-line error, '' for a rank that returned."""
    results = run_raw(rank_main, *args, ranks=ranks, timeout=timeout, **kwargs)
    return [f"{end.kind}: {end.line}" if isinstance(end, Raised) else "" for end in results]


def run_raw(
    rank_main: Callable[..., Any], *args: Any, ranks: int = 2, hosts: int = 1, timeout: float = LIMIT, **kwargs: Any
) -> list[Any]:
    """Return every rank's result, or ``Raised``, or ``Died``. The environment has ``hosts`` hosts."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        env = _environment(rank, ranks, hosts, port)
        process = context.Process(
            target=_rank_entry, args=(theirs, env, rank_main, args, kwargs)
        )  # not a daemon: its loaders have workers
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _collect(pipes, processes, timeout)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(0.0 if sys.exc_info()[0] else 5.0)
            process.kill()
            process.join()


def script(path: str, args: Sequence[str]) -> str:
    """For ``run``: what a script prints on this rank, as the main program, in the directory where it lies."""
    os.chdir(Path(path).parent)
    sys.argv = [path, *args]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def free_port() -> int:
    """Return a port that stays free until it is used: apart from those the kernel deals out, from those that jobs of
    Slurm agree on, and from those of other pytest workers."""
    worker = int(os.environ.get(WORKER, "gw0").removeprefix("gw"))
    for number in _ports:
        port = 10000 + 1000 * worker + number % 1000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


_ports = itertools.count(os.getpid() % 1000)


def _collect(pipes: list[Any], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish within {timeout} s")
        for pipe in ready:
            results[waiting[pipe]] = _receive(pipe, processes[waiting[pipe]])
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, process: Any) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return Died(process.exitcode)


def _rank_entry(pipe: Connection, env: dict[str, str], rank_main: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.environ.update(env)
    gc.freeze()  # what the server has made is shared; a collection that looks through it copies it, 0.3 s each time
    import torch

    torch.set_num_threads(1)
    # Parity is measured in fp32, on GPUs too: cuDNN computes in TF32, and has algorithms (Winograd, FFT) of less
    # precision, of which it takes another for another batch size. Tests of the fast path switch it on.
    torch.backends.cudnn.enabled = False
    try:
        result = rank_main(*args, **kwargs)
    except BaseException as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    pipe.send_bytes(_packed(result))  # by value: the pipe's own pickler would share memory with a dying process
    # Peers may still be talking to this rank: the parent hangs up when all have returned. A rank that raised does not
    # wait for those who may be waiting for it.
    pipe.poll(2.0 if isinstance(result, Raised) else None)
    os._exit(0)


class _HostPickler(pickle.Pickler):
    """A pickler that brings tensors to the host's memory: the tests' own process uses no GPU."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(result: Any) -> bytes:
    buffer = io.BytesIO()
    _HostPickler(buffer).dump(result)
    return buffer.getvalue()


def _environment(rank: int, ranks: int, hosts: int, port: int) -> dict[str, str]:
    own = {WORKER: os.environ[WORKER]} if WORKER in os.environ else {}
    if ranks == 1:
        return own
    here = ranks // hosts
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % here,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": rank // here,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return own | {name: str(value) for name, value in values.items()}


def _story(end: Raised | Died) -> str:
    return end.trace if isinstance(end, Raised) else f"died with exit code {end.exitcode}"
