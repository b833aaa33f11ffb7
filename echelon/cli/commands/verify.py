"""``echelon verify``: run a script on N processes and in one process, and compare the numbers of the two runs."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.base.console import say
from echelon.base.environment import LOG_DIR, PLAN, RECORD_DIR
from echelon.base.errors import UsageError
from echelon.launcher.job import Job
from echelon.launcher.run_options import RunOptions
from echelon.tools.verify.float64 import TOLERANCE
from echelon.tools.verify.verdict import Verdict, apply_float64_verdict, compare_runs
from echelon.tools.verify.verdict_text import as_json, print_verdict
from echelon.tools.verify.verify_options import VerifyOptions, check_verify_options
from echelon.tools.verify.verify_request import VerifyRequest

#: Environment variables of a job that the reference run in one process must not inherit.
_OF_A_JOB = (LOG_DIR, RECORD_DIR, PLAN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


#: Note for scripts with their own loop, which do not call ``engine.step()``: the inputs that the reference run gets.
OF_A_LOOP = (
    "a custom loop is given the batches of all ranks where they come from a loader, and their random numbers; its "
    "other "
    "inputs stay its own"
)


#: The exit code of a comparison without a result.
INCONCLUSIVE = 3


class RunsNotComparable(Exception):
    """Raised if the two runs cannot be compared; the message is the reason."""


class VerifyInterrupted(Exception):
    """Raised if a signal ended a run, which has already been reported; the argument is the exit code."""


def run_verify(options: VerifyOptions, json: bool) -> int:
    """Compare the two runs and return an exit code.

    The code is 0 if the numbers agree, or differ as expected from the strategy; 1 if they differ; 3 if the runs cannot
    be compared.
    """
    check_verify_options(options)
    room = tempfile.mkdtemp(prefix="echelon-verify-")
    options = _of_the_zoo(options, room)
    keep = False
    try:
        verdict = _compared(options, VerifyRequest(room, "plan", options.steps))
        if verdict.status == "differs" and verdict.parting and verdict.parting.step > 1:
            verdict = _reconsidered(options, room, verdict)
    except RunsNotComparable as doubt:
        print(json_module.dumps({"status": "cannot tell", "doubts": [str(doubt)]}) if json else f"cannot tell: {doubt}")
        return INCONCLUSIVE
    except (SignalException, VerifyInterrupted) as stop:
        return 128 + int(stop.sigval) if isinstance(stop, SignalException) else int(stop.args[0])
    except _VerifyScriptFailed as error:
        keep = error.on_ranks  # the launcher has printed the path of the failed rank's log
        raise
    finally:
        _clear(room, keep)
    print(as_json(verdict)) if json else print_verdict(verdict)
    return {"differs": 1, "cannot tell": INCONCLUSIVE}.get(verdict.status, 0)


def _compared(options: VerifyOptions, question: VerifyRequest) -> Verdict:
    _run_ranks(options, _job(options, question.directory), question)
    alone = replace(question, role="reference")
    _run_alone(options, alone)
    if alone.noted("passes") is not None:
        say("one process accumulates another number of losses for an update: repeating it with the ranks' number")
        _run_alone(options, replace(alone, passes=int(alone.noted("passes") or 0)))
    plan, reference = question.answered("plan"), question.answered("reference")
    assert plan is not None
    assert reference is not None
    return compare_runs(plan, reference, TOLERANCE if question.wide else options.tolerance)


def _reconsidered(options: VerifyOptions, room: str, verdict: Verdict) -> Verdict:
    """Compare both runs again in float64 and return the new verdict.

    Runs that differ only after the first step may differ by rounding errors, which some models and optimizers amplify.
    In float64 rounding errors stay small, but a bug does not. If the script fails in float64, the first verdict holds.
    """
    say("the first step is the same and a later one is not: repeating both runs in float64, without visible rounding")
    wide = Path(room, "wide")
    wide.mkdir()
    with contextlib.suppress(UsageError, RunsNotComparable):
        return apply_float64_verdict(
            verdict, _compared(options, VerifyRequest(str(wide), "plan", options.steps, wide=True))
        )
    return verdict


def _clear(room: str, keep_logs: bool) -> None:
    if not keep_logs:
        shutil.rmtree(room, ignore_errors=True)
        return
    for path in Path(room).iterdir():
        if path.is_file():
            path.unlink()


class _VerifyScriptFailed(UsageError):
    """Raised if the script failed; ``on_ranks`` is True if it failed on N processes, not in one process."""

    on_ranks = False


def _of_the_zoo(options: VerifyOptions, room: str) -> VerifyOptions:
    """Return the options for ``echelon verify train -- ARGS``, which runs the module that ``echelon train ARGS`` runs.

    Its output goes to the temporary directory ``room``, unless ``--output_dir`` is given.
    """
    if not options.is_of_the_zoo:
        return options
    argv = options.args[1:] if options.args[:1] == ("--",) else options.args
    given = any(word.partition("=")[0] == "--output_dir" for word in argv)
    out = () if given else ("--output_dir", str(Path(room, "train")))
    return replace(options, script="echelon.zoo.train.run", args=(*argv, *out), module=True)


def _job(options: VerifyOptions, room: str) -> Job:
    from echelon.cli import checked_job
    from echelon.cli.app import run_command

    logs = ["--log-dir", str(Path(room, "log")), "--max-restarts", "0"]
    argv = [*options.argv, *logs, *(["-m"] if options.module else []), options.script, *options.args]
    with run_command().make_context("echelon verify", argv) as context:
        return checked_job(RunOptions(**context.params))


def _run_ranks(options: VerifyOptions, job: Job, question: VerifyRequest) -> None:
    from echelon.launcher.launch_job import launch

    say(f"1 of 2: {options.script} on {job.procs} processes, {options.steps} steps")
    os.environ |= question.ask()
    with _to_stderr():
        code = launch(job)
    check_answer(options, question, code, f"on {job.procs} processes")


def _run_alone(options: VerifyOptions, question: VerifyRequest) -> None:
    say(f"2 of 2: {options.script} in one process, given their batches together")
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB} | question.ask()
    argv = ["-m", options.script] if options.module else [options.script]
    args = options.args[1:] if options.args[:1] == ("--",) else options.args
    # The script's own output goes to stderr, so that stdout has only the table or the JSON.
    ended = subprocess.run([sys.executable, *argv, *args], env=environment, stdout=2, check=False)
    check_answer(options, question, ended.returncode, "in one process")


def check_answer(options: VerifyOptions, question: VerifyRequest, code: int, where: str) -> None:
    """Raise an error with one line if a run has left no answer, or failed."""
    if (refused := question.noted("refused")) is not None:
        raise UsageError(f"verify {options.script}: {refused}")
    if (doubt := question.noted("unclear")) is not None:
        raise RunsNotComparable(doubt)
    if code >= 128:
        raise VerifyInterrupted(code)
    asks_again = question.noted("passes") is not None and not question.passes
    if (asks_again or question.answered(question.role) is not None) and code == 0:
        return
    if code:
        answer = (question.answered("plan") or {}) if question.role == "reference" else {}
        why = f": {OF_A_LOOP}" if answer.get("own_loop") else ""
        failed = _VerifyScriptFailed(f"verify: '{options.script}' failed {where}; its output is above{why}")
        failed.on_ranks = question.role == "plan"
        raise failed
    taken = int(question.noted("steps") or 0)
    if not question.noted("begun"):
        raise UsageError(f"verify: '{options.script}' never called echelon.distribute(); there is nothing to compare")
    if not taken:
        raise UsageError(
            f"verify: '{options.script}' ended without engine.step() or update(); let it train, or give it more data"
        )
    steps = f"{taken} steps" if taken > 1 else "1 step"
    raise UsageError(
        f"verify: '{options.script}' took {steps} {where}, fewer than --steps {options.steps}; give --steps {taken}, "
        "or the script more data"
    )


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    """Redirect stdout, which the ranks inherit, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def launcher_argv(procs: int | None, gpus: str | None, planned: str | None) -> Sequence[str]:
    """Return options of ``echelon run``; by default there is one process per GPU, and at least two."""
    import torch

    if procs is None and gpus is None and planned is None:
        procs = max(2, torch.cuda.device_count())
    given = {"--procs": procs, "--gpus": gpus, "--plan": planned}
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]
