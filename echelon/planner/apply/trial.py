"""Trials for ``auto="measure"``: the best few plans run for some steps, each in temporary child processes.

Every rank starts its script again, with an environment variable that makes ``distribute()`` run one candidate: the
child trains on the first batches for a few steps, writes the time of a step to a file, and exits. If a child runs out
of memory, crashes or takes too long, its plan is skipped, and the parent process is not affected.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.base.auth_proxy import local_store_endpoint, serve_store
from echelon.base.environment import (
    AGENT_STORE,
    BOUND_MARK,
    LOG_DIR,
    LOOPBACK,
    PADDLE_ENDPOINTS,
    PLAN,
    RECORD_DIR,
    RESTART_COUNT,
    TRIAL,
)
from echelon.base.formatting import duration
from echelon.base.job_secret import find_token
from echelon.distributed import rank_main
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.launcher.failure import read_record
from echelon.plan.saved_plan import SavedPlan

#: Number of warm-up steps: an engine's first ones take up to 1.6 times as long.
WARM = 3
#: Least and most timed steps, and the seconds that they take together in between: short steps scatter more.
FEWEST, MOST, COUNTED = 5, 40, 2.0
#: Seconds that a trial may take, in addition to twice this process's time until the trial and to the predicted steps.
PATIENCE = 120.0
LOOK = 0.1

BEGUN = time.monotonic()  #: about when this process began

_FAILED = "failed"


# ---- in the child process ----


class TimedEngine(Protocol):
    """An engine whose steps are timed."""

    @property
    def world(self) -> World: ...

    def step(self, *batch: Any, **named: Any) -> Any:
        """Train on one batch."""


@dataclass
class Trial:
    """The task of a child process: the plan to time, and the file for its report."""

    candidate: SavedPlan
    report: Path
    _has_begun: bool = False

    def run(self, engine: TimedEngine, batches: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Train for some steps, write the median time of a step to the report, and exit the process.

        In the steps themselves, the call does nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        seconds = []
        predicted = self.candidate.predicted.seconds if self.candidate.predicted else COUNTED
        for _, (args, named) in zip(range(WARM + counted_steps(predicted)), batches, strict=False):
            begun = _now(engine.world.device)
            engine.step(*args, **named)
            seconds.append(_now(engine.world.device) - begun)
        counted = seconds[WARM:] or seconds
        part = self.report.with_suffix(".part")
        part.write_text(json.dumps({"seconds": statistics.median(counted)}))
        part.replace(self.report)
        with contextlib.suppress(RuntimeError):
            if engine.world.control is not None:
                dist.barrier(engine.world.control)  # a rank that exits early closes connections that others still use
        sys.stdout.flush()
        os._exit(0)  # the rest of the script must not run


def counted_steps(predicted: float) -> int:
    """Return the number of steps that a trial times, from the predicted seconds of a step: equal on all ranks."""
    return max(FEWEST, min(MOST, round(COUNTED / max(predicted, 1e-6))))


def find_trial() -> Trial | None:
    """Return the trial that this process was started for, or None."""
    path = os.environ.get(TRIAL)
    if path is None:
        return None
    task = json.loads(Path(path).read_text())
    return Trial(SavedPlan.from_json(task["plan"]), Path(task["report"]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- in the parent process ----


class TrialOutcome(NamedTuple):
    """The outcome of a trial: seconds of a step, or None and a reason if the trial failed."""

    seconds: float | None
    reason: str = ""


class TrialScript(NamedTuple):
    """The program of this process and its arguments, to start it again. ``kind``: "script" or "module"."""

    kind: str
    program: str
    args: tuple[str, ...]


def find_quickest_plan(
    plans: Sequence[SavedPlan], world: World, model: nn.Module, say: Callable[[str], None]
) -> SavedPlan:
    """Return the plan with the fastest trial, or the first plan if no trial succeeds.

    All ranks must call it together.
    """
    script = own_script()
    found = [script is not None] if world.control is None else gather_json(script is not None, world.control)
    if script is None or not all(found):
        say("auto: there is no script to run again for trials here; the plan is the one predicted to be quickest")
        return plans[0]
    say(f"auto: trying {len(plans)} plans, one after another, in processes of their own")
    begun = time.monotonic()
    with _out_of_the_way(model, world), _TrialRunner(world, script) as runner:
        outcomes = [runner.tried(plan) for plan in plans]
    for plan, outcome in zip(plans, outcomes, strict=True):
        say(f"auto: tried {plan.draft}: {_in_words(plan, outcome)}")
    say(f"auto: the trials took {duration(time.monotonic() - begun)}")
    timed = [(outcome.seconds, at) for at, outcome in enumerate(outcomes) if outcome.seconds is not None]
    if not timed:
        say("auto: no trial has finished; the plan is the one predicted to be quickest")
        return plans[0]
    best = plans[min(timed)[1]]
    say(f"auto: chosen after {len(plans)} trials: {best.draft}")
    return best


def _in_words(plan: SavedPlan, outcome: TrialOutcome) -> str:
    predicted = f", predicted {1e3 * plan.predicted.seconds:.3g} ms" if plan.predicted else ""
    if outcome.seconds is None:
        return f"failed, {outcome.reason}{predicted}"
    return f"{1e3 * outcome.seconds:.3g} ms a step{predicted}"


def own_script() -> TrialScript | None:
    """Return the program of this process, or None if it cannot be started again.

    That is the case in a notebook, at a prompt, and in a process started by multiprocessing.
    """
    words = sys.orig_argv
    if rank_main.__file__ in words:
        kind, program, *args = words[words.index(rank_main.__file__) + 3 :]
        return TrialScript(kind, program, tuple(args))
    main = sys.modules["__main__"]
    if multiprocessing.parent_process() is not None or not hasattr(main, "__file__"):
        return None
    if (spec := getattr(main, "__spec__", None)) is not None:
        return TrialScript("module", spec.name.removesuffix(".__main__"), tuple(sys.argv[1:]))
    return TrialScript("script", str(main.__file__), tuple(sys.argv[1:]))


@contextlib.contextmanager
def _out_of_the_way(model: nn.Module, world: World) -> Iterator[None]:
    """Keep the model in host memory within the context, so that the trials can use the GPU's memory."""
    if world.device.type != "cuda":
        yield
        return
    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(world.device)


class _TrialRunner:
    """Runs trials, with one child on every rank. Ranks signal failures to each other through a store of their own."""

    def __init__(self, world: World, script: TrialScript) -> None:
        self._world, self._script, self._round = world, script, 0
        self._directory = tempfile.TemporaryDirectory(prefix="echelon-trial-")
        self._address = _first_host(world)
        self._token = None if world.place.one_host else find_token()
        self._served: list[TCPStore] = []
        self._store = self._open_store()

    def __enter__(self) -> _TrialRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self._directory.cleanup()

    def _open_store(self) -> TCPStore | None:
        world = self._world
        if world.control is None:
            return None
        return TCPStore(*self._store_endpoint(), is_master=False, wait_for_workers=False)

    def _store_endpoint(self) -> tuple[str, int]:
        """Return the host and port at which this rank and its child reach a new store, which rank 0 serves."""
        port = 0
        if self._world.rank == 0:
            store, port = serve_store(self._address, 0, self._token, timedelta(minutes=5))
            self._served = [*self._served[:1], store]  # the parents' store, and that of the current trial
        if self._world.control is not None:
            port = gather_json(port, self._world.control)[0]
        return local_store_endpoint(self._address, port, self._token)

    def tried(self, plan: SavedPlan) -> TrialOutcome:
        self._round += 1
        place = Path(self._directory.name) / str(self._round)
        place.mkdir()
        task = place / "trial.json"
        task.write_text(json.dumps({"plan": plan.to_json(), "report": str(place / "report.json")}))
        environment = self._environment(place, task)
        try:
            outcome = self._watched(self._start(place, environment), place, _patience(plan))
        except OSError as error:  # other ranks wait for this rank's outcome
            outcome = self._failed(TrialOutcome(None, f"could not be started: {error.strerror}"))
        if self._world.control is None:
            return outcome
        others = [TrialOutcome(*found) for found in gather_json(list(outcome), self._world.control)]
        failed = [outcome for outcome in others if outcome.seconds is None]
        reasons = [outcome.reason for outcome in failed if outcome.reason != _FAILED]
        return TrialOutcome(None, (reasons or [_FAILED])[0]) if failed else max(others)

    def _start(self, place: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        words = [rank_main.__file__, str(os.getpid()), str(place), *self._script[:2], *self._script.args]
        with (place / "output").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def _environment(self, place: Path, task: Path) -> dict[str, str]:
        where = self._world.place
        address, port = self._store_endpoint()
        job = {
            "RANK": where.rank,
            "WORLD_SIZE": where.world_size,
            "LOCAL_RANK": where.local_rank,
            "LOCAL_WORLD_SIZE": where.local_world_size,
            "GROUP_RANK": where.node_rank,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            AGENT_STORE: "True",
            "TORCHELASTIC_ERROR_FILE": place / "end.json",
            RESTART_COUNT: 0,
            LOG_DIR: place,
            TRIAL: task,
        }
        kept = {name: value for name, value in os.environ.items() if name not in (PLAN, BOUND_MARK, RECORD_DIR)}
        return kept | {name: str(value) for name, value in job.items()}

    def _watched(self, child: subprocess.Popen[bytes], place: Path, patience: float) -> TrialOutcome:
        """Wait until the child has ended, another rank's child has failed, or the time is up, and return the outcome.

        The child is killed if it is still running.
        """
        deadline = time.monotonic() + patience
        try:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    return self._failed(TrialOutcome(None, f"not finished after {patience:.0f} s"))
                if self._store is not None and self._store.check([f"{_FAILED}/{self._round}"]):
                    return TrialOutcome(None, _FAILED)
                time.sleep(LOOK)
            return self._reported(child.returncode, place)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()

    def _reported(self, code: int, place: Path) -> TrialOutcome:
        report = place / "report.json"
        if report.exists():
            return TrialOutcome(float(json.loads(report.read_text())["seconds"]))
        end = read_record(place / "end.json")
        said = " ".join(str(end.get("message") or "").split())[:160]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        kind = end.get("kind") or ""
        return self._failed(
            TrialOutcome(None, f"{kind}: {said}" if kind else how), secondary=bool(end.get("secondary"))
        )

    def _failed(self, outcome: TrialOutcome, secondary: bool = False) -> TrialOutcome:
        if self._store is not None:
            self._store.set(f"{_FAILED}/{self._round}", "1")
        return TrialOutcome(None, _FAILED) if secondary else outcome


def _patience(plan: SavedPlan) -> float:
    expected = plan.predicted.seconds if plan.predicted else 0.0
    return PATIENCE + 2 * (time.monotonic() - BEGUN) + 10 * (WARM + counted_steps(expected)) * expected


def _first_host(world: World) -> str:
    """Return the address of rank 0's host. MASTER_ADDR may be the address of a rank's local tunnel to that host."""
    if world.place.one_host:
        return LOOPBACK
    endpoints = os.environ.get(PADDLE_ENDPOINTS, "")
    return endpoints.partition(",")[0].rpartition(":")[0].strip("[]") or world.place.master_addr
