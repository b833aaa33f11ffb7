"""Stragglers: from reports as data to findings and tables, then with real ranks and no launcher."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import nn
from zoo import QUIET

import echelon
from echelon import pipeline, stage
from echelon.base.environment import STALL
from echelon.distributed.activity import Activity, activity, calling, describe_ranks, format_ranks, parse_ranks, waiting
from echelon.launcher.failure import STALLED, Failure
from echelon.observability.stall import stragglers as slow
from echelon.observability.stall.diagnose import find_stall
from echelon.observability.stall.rank_status import RankObservation, RankStatus, RankWait
from echelon.observability.stall.reporter import report
from echelon.observability.stall.stall_table import table
from echelon.observability.stall.stragglers import Stragglers

LIMIT = 60.0


def status(rank: int, wait: RankWait | None = None, **given: Any) -> RankStatus:
    counts = {wait.key: wait.number} if wait else {}
    facts: dict[str, Any] = {
        "host": "ab"[rank % 2], "pid": 4711 + rank, "beat": 1, "step": 8, "phase": "communicate", "seconds": 63.0,
        "call": "step", "wait": wait, "counts": counts, "cpu": 0.0, "io": 0, "busy": {}, "steps": 8, "alike": "",
    }  # fmt: skip
    return RankStatus(rank, **facts | given)


def waits(
    rank: int, call: str, what: str = "", *, ranks: str = "0-2", number: int = 5, **given: Any
) -> RankObservation:
    return RankObservation(rank, status(rank, RankWait(call, what, ranks, number, given.pop("for_s", 63.0)), **given))


def seen(*ranks: RankObservation) -> dict[int, RankObservation]:
    return {one.rank: one for one in ranks}


def test_stall_rank_in_user_code_is_late_and_waiting_ranks_not() -> None:
    """A rank in user code is late, and the ranks that wait for it are not."""
    late = RankObservation(2, status(2, phase="user code", call="", step=7))
    ranks = seen(waits(0, "sum of gradients", "bucket 3 (a .. b)"), waits(1, "sum of gradients", "bucket 3"), late)
    finding = find_stall(ranks, LIMIT)
    assert finding is not None
    assert finding.late == (2,)
    assert finding.cause == "rank 2 (host a, pid 4713) is late: it has been in user code for 63 s"
    assert not finding.works
    assert find_stall(ranks, 64.0) is None
    assert table(ranks, finding, {2: "File x\n  sleep()"}, "Nothing is ended.").splitlines() == [
        "echelon: the job has stalled",
        "rank  host  step  phase        waits in                             for     since",
        "0     a     8     communicate  sum of gradients: bucket 3 (a .. b)  rank 2  63 s",
        "1     b     8     communicate  sum of gradients: bucket 3           rank 2  63 s",
        "2     a     7     user code                                                 63 s",
        "rank 2 (host a, pid 4713) is late: it has been in user code for 63 s",
        "rank 2 is here:",
        "  File x",
        "    sleep()",
        "Nothing is ended.",
    ]


def test_of_a_chain_of_waits_its_end_is_late() -> None:
    ranks = seen(
        waits(0, "receive gradients", ranks="1"),
        waits(1, "receive gradients", ranks="2", for_s=61.0),
        RankObservation(2, status(2, phase="backward"), works=True),
    )
    finding = find_stall(ranks, LIMIT)
    assert finding is not None
    assert (finding.late, finding.works) == ((2,), True)
    assert finding.cause.endswith("it has been in backward of step 8 for 63 s")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"process": "T"}, "; its process is stopped (SIGSTOP)"),
        ({"process": "S", "lost": True}, "; its process runs, but its Python interpreter does not"),
        ({"lost": True}, ""),
    ],
)
def test_a_silent_rank_is_late_whatever_it_said_last(given: dict[str, Any], why: str) -> None:
    still = RankObservation(1, waits(1, "sum of gradients", ranks="0,1").status, 63.0, **given)
    finding = find_stall(seen(waits(0, "sum of gradients", ranks="0,1"), still), LIMIT)
    assert finding is not None
    assert finding.late == (1,)
    assert finding.cause == f"rank 1 (host b, pid 4712) is late: it has sent no heartbeat for 63 s{why}"


def test_ranks_that_have_ended_or_never_came_are_late() -> None:
    finding = find_stall(
        seen(waits(0, "barrier()"), RankObservation(1, status(1, left=True)), RankObservation(2)), LIMIT
    )
    assert finding is not None
    assert finding.late == (1, 2)
    assert finding.cause.splitlines() == [
        "rank 1 (host b, pid 4712) is late: its script has ended",
        "rank 2 is late: it has sent no heartbeat at all",
    ]


def test_calls_that_can_never_meet_are_told_before_the_limit() -> None:
    one = RankObservation(0, status(0, RankWait("agreement", "", "0,1", 2, 6.0), call="save"))
    other = RankObservation(1, status(1, RankWait("loss and samples", "", "0,1", 9, 6.0)))
    finding = find_stall(seen(one, other), LIMIT)
    assert finding is not None
    assert finding.late == (0, 1)
    assert finding.cause == (
        "ranks 0 and 1 are in different calls: rank 0 in save() (agreement), rank 1 in step 8 (loss and samples); "
        "every rank must make the same calls in the same order"
    )
    early = RankObservation(1, status(1, RankWait("loss and samples", "", "0,1", 9, 4.0)))
    assert find_stall(seen(one, early), LIMIT) is None


def test_who_has_passed_a_call_is_not_waited_for_there() -> None:
    """Rank 1 is further on: its part of what rank 0 waits in has been sent, and both wait for rank 2."""
    ahead = status(1, RankWait("sum of gradients", "", "0-2", 4, 62.0))
    ahead = RankStatus(**{**ahead.__dict__, "counts": {"sum of gradients|0-2": 4, "loss and samples|0-2": 5}})
    ranks = seen(waits(0, "loss and samples"), RankObservation(1, ahead), RankObservation(2, status(2, phase="data")))
    finding = find_stall(ranks, LIMIT)
    assert finding is not None
    assert finding.late == (2,)


def test_no_rank_is_blamed_where_all_have_come() -> None:
    finding = find_stall(seen(*(waits(rank, "sum of gradients") for rank in range(3))), LIMIT)
    assert finding is not None
    assert finding.late == ()
    assert "network" in finding.cause


def test_ranks_waiting_for_each_other_are_told_at_the_limit() -> None:
    """Two ranks that wait for messages of one another are reported once the limit has passed."""

    def ring(seconds: float) -> dict[int, RankObservation]:
        return seen(
            waits(0, "receive gradients", ranks="1", for_s=seconds),
            waits(1, "receive activations", ranks="0", for_s=seconds),
        )

    assert find_stall(ring(30.0), LIMIT) is None
    finding = find_stall(ring(61.0), LIMIT)
    assert finding is not None
    assert finding.late == (0, 1)


def test_rank_status_round_trips_and_other_text_is_refused() -> None:
    """Reports of ranks come back as they were, and nothing else is taken for one."""
    given = status(0, RankWait("save", "step 8", "all", 3, 1.0))
    assert RankStatus.from_json(given.to_json()) == given
    for wrong in ("", "[]", "{}", given.to_json().replace('"host": "a"', '"host": "\\u001b[2J"'), '{"rank": 0}'):
        with pytest.raises(ValueError, match="not a rank's report"):
            RankStatus.from_json(wrong)


@pytest.mark.parametrize(
    ("ranks", "short"), [([0], "0"), ([3, 1], "1,3"), ([0, 1, 2], "0-2"), ([1, 3, 5], "1-5:2"), ([0, 1, 3], "0,1,3")]
)
def test_ranks_in_short(ranks: list[int], short: str) -> None:
    assert format_ranks(ranks) == short
    assert parse_ranks(short, 8) == tuple(sorted(ranks))
    assert describe_ranks(None) == "all"
    assert parse_ranks("all", 3) == (0, 1, 2)


def test_waits_count_by_call_and_ranks_and_inner_ones_do_not() -> None:
    """Waits are counted by call and ranks, and an inner wait is part of the outer one."""
    before = activity.counts.get(("sum", "0,1"), 0)
    with calling("step", 3, "forward"), waiting("sum", "bucket 0", (0, 1)):
        assert activity.wait is not None
        assert (activity.wait.call, activity.wait.number, activity.call) == ("sum", before + 1, "step")
        with waiting("gather"):
            assert activity.wait.call == "sum"
        assert activity.wait.call == "sum"
    assert activity.wait is None
    assert activity.counts["sum", "0,1"] == before + 1
    assert activity.phase == "user code"


def test_work_is_what_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("echelon.distributed.activity.monotonic", lambda: now[0])
    own = Activity()
    now[0] += 5.0
    own.waited += 2.0
    own.lap("forward")
    assert own.busy == {"forward": 3.0}
    assert own.phase == "backward"


def test_slow_rank_is_named_after_3_windows_and_every_10_minutes() -> None:
    """A slow rank is named after three windows and then at most once in ten minutes."""
    stragglers, said = Stragglers(), []
    for window in range(130):
        steps = 20 * window
        ranks = {
            rank: status(
                rank, steps=steps, alike="0-2",
                busy={"forward": steps * (0.02 if rank == 2 else 0.01), "data": steps * 0.005, "communicate": 9.0},
            )
            for rank in range(3)
        }  # fmt: skip
        said += [(window, line) for line in stragglers.compare(ranks, 6.0 * window)]
    line = "rank 2 (host a) is slow: its own part of a step takes 1.7 times the median (data 1.0, forward 2.0)"
    assert said == [(3, line), (103, line)]


def test_stages_are_not_compared_with_one_another() -> None:
    stragglers = Stragglers()
    for window in range(9):
        steps = 20 * window
        ranks = {r: status(r, steps=steps, alike=str(r), busy={"forward": steps * (1 + r)}) for r in range(2)}
        assert not stragglers.compare(ranks, 6.0 * window)


def test_a_stalled_rank_in_one_line() -> None:
    failure = Failure(1, 2, "b", 4711, 1, 0.0, kind=STALLED, message="it has been in user code for 63 s")
    assert failure.line == "rank 1 of 2 (host b, pid 4711) stalled: it has been in user code for 63 s"
    assert not failure.explained


# ---- real ranks ----


def make(**options: Any) -> echelon.Engine:
    echelon.init(device="cpu", timeout=100)
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return echelon.distribute(model, optimizer=sgd, log=QUIET, **{"loss": F.cross_entropy} | options)


BATCH = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])


def watch(seconds: float) -> None:
    """From here on, where all ranks are: they may have come here seconds apart on a busy machine."""
    echelon.barrier()
    os.environ[STALL] = str(seconds)
    report(echelon.distributed.world.current())


def save_on_rank_0(directory: str, after: int) -> None:
    engine = make()
    for _ in range(after):
        engine.step(*BATCH)
    if echelon.rank() == 0:
        engine.save(directory)
    engine.step(*BATCH)


def test_save_on_one_rank_in_the_first_steps_is_told_at_once(tmp_path: Any) -> None:
    line = (
        "rank 1 calls step() (step 2) while rank 0 calls save(); every rank must make the same calls in the same order"
    )
    assert errors(save_on_rank_0, str(tmp_path), 1) == [f"MismatchError: {line}"] * 2


def many_mistakes() -> list[str]:
    """Each mistake is found before any rank waits, and all ranks can go on from it."""
    engine = make()
    told = []
    rank = echelon.rank()
    calls = [
        (lambda: engine.evaluate([BATCH])) if rank == 0 else lambda: engine.step(*BATCH),
        engine.whole_state if rank == 1 else engine.synchronize,
    ]
    for call in calls:
        try:
            call()
        except echelon.base.errors.MismatchError as error:
            told.append(str(error))
    engine.step(*BATCH)
    return told


def test_evaluation_on_some_ranks_only_is_told_on_all() -> None:
    told = run(many_mistakes)
    assert told[0] == told[1]
    assert [line.partition(";")[0] for line in told[0]] == [
        "rank 1 calls step() (step 1) while rank 0 calls evaluate()",
        "rank 1 calls whole_state() while rank 0 calls synchronize()",
    ]


def optimizers_in_another_order() -> None:
    echelon.init(device="cpu", timeout=100)
    models = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    sgd = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    engine = echelon.distribute(models, optimizer=sgd, log=QUIET)
    for name in ("a", "b") if echelon.rank() == 0 else ("b", "a"):
        engine.backward(models[name](BATCH[0]).mean())
        engine.update(name)


def test_optimizers_in_another_order_are_told() -> None:
    first = "MismatchError: rank 1 calls update('b') (step 1) while rank 0 calls update('a') (step 1)"
    assert [line.partition(";")[0] for line in errors(optimizers_in_another_order)] == [first] * 2


@contextlib.contextmanager
def stderr_until(sign: str) -> Any:
    """Capture stderr until ``sign`` appears in it."""
    out = io.StringIO()

    def wait(patience: float = LIMIT) -> str:
        deadline = time.monotonic() + patience
        while sign not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        return out.getvalue()

    with contextlib.redirect_stderr(out):
        yield wait


def pipeline_with_a_slow_stage() -> str:
    os.environ[STALL] = "0"
    torch.manual_seed(0)
    model = echelon.annotate(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"": pipeline(micro_batches=2), "0": stage(0), "1": stage(1)}
    )
    with stderr_until("ended") as told:
        engine = make(model=model, sample=BATCH)
        engine.step(*BATCH)
        watch(1)
        if echelon.rank() == 1:
            model[1].register_forward_pre_hook(lambda *_: told() and None)
        engine.step(*BATCH)
        return str(told())


def test_sleeping_stage_is_named_with_the_awaited_micro_batch() -> None:
    said = run(pipeline_with_a_slow_stage)
    for text in said:
        assert "receive gradients: micro-batch 0, stage 1 to 0" in text
        assert ") is late: it has been in" in text
        assert "rank 1 is here:" in text
        assert "time.sleep(0.05)" in text
    assert said[0] == said[1]


def a_save_after_the_first_steps(directory: str) -> str:
    os.environ[STALL] = "0"
    with stderr_until("ended") as told:
        engine = make()
        for _ in range(5):
            engine.step(*BATCH)
        watch(2)
        if echelon.rank() == 0:
            threading.Thread(target=engine.save, args=(directory,), daemon=True).start()
        else:
            threading.Thread(target=engine.step, args=BATCH, daemon=True).start()
        return str(told())


def test_save_on_one_rank_after_the_first_steps_is_told_soon(tmp_path: Any) -> None:
    for text in run(a_save_after_the_first_steps, str(tmp_path)):
        assert (
            "\nranks 0 and 1 are in different calls: rank 0 in save() (roll call), rank 1 in step 6 (sum of "
            "gradients); every rank must make the same calls in the same order\n"
        ) in text


def train_with_a_slow_loss() -> str:
    os.environ[STALL] = "0"
    slow.SECONDS = 0.4  # windows of 20 steps then, where real ones have at least 5 s

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if echelon.rank() == 1:
            time.sleep(0.02)  # far above what a busy machine adds to either rank
        return F.cross_entropy(output, target)

    with stderr_until("is slow") as told:
        engine = make(loss=loss)
        engine.step(*BATCH)
        watch(LIMIT)
        told_all = torch.zeros(1)
        while not told_all:
            for _ in range(20):
                engine.step(*BATCH)
            told_all = torch.tensor([float("is slow" in told(patience=0.0))])
            torch.distributed.all_reduce(told_all, torch.distributed.ReduceOp.MIN)
        return str(told())


def test_a_rank_that_is_slow_all_the_time_is_named_on_all_ranks() -> None:
    for text in run(train_with_a_slow_loss):
        (line,) = [line for line in text.splitlines() if "is slow" in line]
        assert re.fullmatch(
            rf"echelon: rank 1 \(host {socket.gethostname()}\) is slow: its own part of a step takes \d+\.\d times the "
            r"median \(.*forward \d+\.\d.*\)",
            line,
        )
