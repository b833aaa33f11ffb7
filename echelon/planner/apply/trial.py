"""``auto="measure"``: the best few plans are run for some steps, each in processes of its own that are thrown away.

Every rank starts its script once more, with a variable that makes ``distribute()`` run one candidate: on the first
batches, for a few steps, then the process writes down how long they took, and ends. One that runs out of memory,
crashes or takes too long harms nothing: its plan is passed over.
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
from typing import Any, NamedTuple, NoReturn, Protocol

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
from echelon.base.job_secret import find_token
from echelon.distributed import rank_main
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.launcher.failure import read_record
from echelon.plan.saved_plan import SavedPlan

#: Steps that are not counted, and steps that are.
WARM, COUNTED = 2, 5
#: Seconds that a trial has, beyond twice what this process took to come as far as that.
PATIENCE = 120.0
LOOK = 0.1

_BEGUN = time.monotonic()

_FAILED = "failed"


# ---- in the process that is thrown away ----


class TimedEngine(Protocol):
    """An engine whose steps are timed."""

    world: World
    trial: Any

    def step(self, *batch: Any, **named: Any) -> Any:
        """Train on one batch."""


@dataclass
class Trial:
    """What a process that only times a candidate has been told."""

    candidate: SavedPlan
    report: Path

    def run(self, engine: TimedEngine, batches: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> NoReturn:
        """Train for some steps, write down how long one took, and end."""
        engine.trial = None
        seconds = []
        for _, (args, named) in zip(range(WARM + COUNTED), batches, strict=False):
            begun = _now(engine.world.device)
            engine.step(*args, **named)
            seconds.append(_now(engine.world.device) - begun)
        counted = seconds[WARM:] or seconds
        part = self.report.with_suffix(".part")
        part.write_text(json.dumps({"seconds": statistics.median(counted)}))
        part.replace(self.report)
        with contextlib.suppress(RuntimeError):
            if engine.world.control is not None:
                dist.barrier(engine.world.control)  # whoever leaves first hangs up on the others
        sys.stdout.flush()
        os._exit(0)  # the script is not to go on, whatever it would do next


def find_trial() -> Trial | None:
    """The trial that this process is for."""
    path = os.environ.get(TRIAL)
    if path is None:
        return None
    told = json.loads(Path(path).read_text())
    return Trial(SavedPlan.from_json(told["plan"]), Path(told["report"]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- in the process that goes on ----


class TrialOutcome(NamedTuple):
    """seconds of a step; None and a reason for a trial that failed."""

    seconds: float | None
    reason: str = ""


class TrialScript(NamedTuple):
    """How this process's program is run again."""

    kind: str
    program: str
    args: tuple[str, ...]


def find_quickest_plan(
    plans: Sequence[SavedPlan], world: World, model: nn.Module, say: Callable[[str], None]
) -> SavedPlan:
    """The plan whose trial was quickest; the first of them, where no trial tells. All ranks call it together."""
    script = own_script()
    found = [script is not None] if world.control is None else gather_json(script is not None, world.control)
    if script is None or not all(found):
        say("auto: there is no script to run again for trials here; the plan is the one predicted to be quickest")
        return plans[0]
    say(f"auto: trying {len(plans)} plans, one after another, in processes of their own")
    with _out_of_the_way(model, world), _TrialRunner(world, script) as crew:
        outcomes = [crew.tried(plan) for plan in plans]
    for plan, outcome in zip(plans, outcomes, strict=True):
        say(f"auto: tried {plan.draft}: {_in_words(plan, outcome)}")
    timed = [(outcome.seconds, at) for at, outcome in enumerate(outcomes) if outcome.seconds is not None]
    if not timed:
        say("auto: no trial came to an end; the plan is the one predicted to be quickest")
        return plans[0]
    best = plans[min(timed)[1]]
    say(f"auto: taken after {len(plans)} trials: {best.draft}")
    return best


def _in_words(plan: SavedPlan, outcome: TrialOutcome) -> str:
    predicted = f", predicted {1e3 * plan.predicted.seconds:.3g} ms" if plan.predicted else ""
    if outcome.seconds is None:
        return f"failed, {outcome.reason}{predicted}"
    return f"{1e3 * outcome.seconds:.3g} ms a step{predicted}"


def own_script() -> TrialScript | None:
    """What this process runs, where that can be run again; None in a notebook, at a prompt, or in a child process."""
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
    """A GPU is left to the trials; the model waits in host memory."""
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
    """Runs trials, one child on every rank. Ranks tell one another through a store of their own when one has failed."""

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
        return TCPStore(*self._meeting_place(), is_master=False, wait_for_workers=False)

    def _meeting_place(self) -> tuple[str, int]:
        """Of a new store, which rank 0 serves: where this rank and its child reach it."""
        port = 0
        if self._world.rank == 0:
            store, port = serve_store(self._address, 0, self._token, timedelta(minutes=5))
            self._served = [*self._served[:1], store]  # the ranks' own, and that of the trial under way
        if self._world.control is not None:
            port = gather_json(port, self._world.control)[0]
        return local_store_endpoint(self._address, port, self._token)

    def tried(self, plan: SavedPlan) -> TrialOutcome:
        self._round += 1
        place = Path(self._directory.name) / str(self._round)
        place.mkdir()
        told = place / "trial.json"
        told.write_text(json.dumps({"plan": plan.to_json(), "report": str(place / "report.json")}))
        environment = self._environment(place, told)
        try:
            mine = self._watched(self._start(place, environment), place, _patience(plan))
        except OSError as error:  # others wait for what this rank has to say
            mine = self._tell(TrialOutcome(None, f"could not be started: {error.strerror}"))
        if self._world.control is None:
            return mine
        others = [TrialOutcome(*found) for found in gather_json(list(mine), self._world.control)]
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

    def _environment(self, place: Path, told: Path) -> dict[str, str]:
        where = self._world.place
        address, port = self._meeting_place()
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
            TRIAL: told,
        }
        kept = {name: value for name, value in os.environ.items() if name not in (PLAN, BOUND_MARK, RECORD_DIR)}
        return kept | {name: str(value) for name, value in job.items()}

    def _watched(self, child: subprocess.Popen[bytes], place: Path, patience: float) -> TrialOutcome:
        """Until the child has ended, another rank's has failed, or time is up. Nothing of it is left afterwards."""
        deadline = time.monotonic() + patience
        try:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    return self._tell(TrialOutcome(None, f"not done after {patience:.0f} s"))
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
        return self._tell(TrialOutcome(None, f"{kind}: {said}" if kind else how), secondary=bool(end.get("secondary")))

    def _tell(self, outcome: TrialOutcome, secondary: bool = False) -> TrialOutcome:
        if self._store is not None:
            self._store.set(f"{_FAILED}/{self._round}", "1")
        return TrialOutcome(None, _FAILED) if secondary else outcome


def _patience(plan: SavedPlan) -> float:
    expected = plan.predicted.seconds if plan.predicted else 0.0
    return PATIENCE + 2 * (time.monotonic() - _BEGUN) + 10 * (WARM + COUNTED) * expected


def _first_host(world: World) -> str:
    """The address of rank 0's host. What ranks know as MASTER_ADDR may be their own host's tunnel to it."""
    if world.place.one_host:
        return LOOPBACK
    endpoints = os.environ.get(PADDLE_ENDPOINTS, "")
    return endpoints.partition(",")[0].rpartition(":")[0].strip("[]") or world.place.master_addr
