"""Timelines of real ranks: one clock, spans inside their steps, waits that are as long as a neighbour sleeps."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Died, Raised, run, run_raw
from torch import Tensor, nn
from trace_rules import check_trace

import echelon
from echelon.observability.trace import summarize, trace_files
from echelon.observability.trace.clock_sync import ClockMapping, measure
from echelon.observability.trace.merge import merge
from echelon.observability.trace.perfetto import trace_of
from echelon.observability.trace.span import HOST, NETWORK, Span
from echelon.observability.trace.trace_files import RankTrace
from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate

FAST, SLOW = 0.002, 0.1  # seconds that the replicas sleep in each forward pass
SHIFT = 1000.0  # seconds by which rank 1's clock is ahead
STEPS = (2, 4)


#: Seconds of every sleep of this process: on a busy machine they are longer than what was asked for.
SLEPT: list[float] = []


def sleep(seconds: float) -> None:
    begun = time.monotonic()
    time.sleep(seconds)
    SLEPT.append(time.monotonic() - begun)


class Sleeps(torch.autograd.Function):
    """Time that no other process can take away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        sleep(forward)
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Slow(nn.Module):
    def __init__(self, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self._seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x, *self._seconds)


def ahead() -> float:
    return time.monotonic() + SHIFT


def shift_clock() -> None:
    import echelon.distributed.activity
    import echelon.observability.trace.span_recorder
    import echelon.parallel.pipeline.schedule_loop

    for module in (
        echelon.observability.trace.span_recorder,
        echelon.distributed.activity,
        echelon.parallel.pipeline.schedule_loop,
    ):
        module.monotonic = ahead  # type: ignore[attr-defined]


def train(model: nn.Module, directory: str, asked: str | bool, steps: int = 5) -> list[int]:
    """The bytes of every bucket of gradients."""
    engine = echelon.distribute(
        model,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        log=echelon.Log(dir=directory, timeline=asked, console=False),
    )
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(8 * steps, 16, generator=generator), torch.randn(8 * steps, 4, generator=generator)
    for batch in engine.loader(data, global_batch=8):
        engine.step(*batch)
    engine.close()
    return [bucket._row.nbytes for reducer in engine._parts.gradients._reducers.values() for bucket in reducer._buckets]


def uneven(directory: str) -> list[int]:
    """Two replicas of which the second sleeps longer, has a wrong clock, and a disk of its own."""
    echelon.init()
    second = echelon.rank() == 1
    if second:
        shift_clock()
    model = nn.Sequential(nn.Linear(16, 24), Slow(SLOW if second else FAST), nn.Linear(24, 4))
    return train(model, f"{directory}/elsewhere" if second else directory, "{}:{}".format(*STEPS))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    buckets = run(uneven, str(directory), ranks=2)
    (directory / "buckets.json").write_text(json.dumps(buckets))
    return directory


def read(directory: Path) -> list[RankTrace]:
    return trace_files.read(directory / "timeline")


def phases(ranked: RankTrace) -> dict[int, list[Span]]:
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in ranked.spans:
        if "phase" in span.more:
            found[span.step].append(span)
    return found


# ---- one clock ----


def test_wrong_clock_is_corrected_within_the_stated_error(replicas: Path) -> None:
    first, second = read(replicas)
    assert first.about["clock_offset"] == 0
    assert abs(second.about["clock_offset"] + SHIFT) <= second.about["clock_error"] < 0.1
    for rank in (first, second):
        began, ended = rank.spans[0].begin, max(span.end for span in rank.spans)
        assert abs(began - first.spans[0].begin) < SHIFT / 100, "both begin together, once they are on one clock"
        assert ended - began < 60


def measured(rate: float) -> tuple[tuple[float, float], float]:
    world = echelon.init()

    def clock() -> float:
        return time.monotonic() * (rate if world.rank else 1.0)

    before = measure(world.control, clock)
    time.sleep(0.3)
    after = measure(world.control, clock)
    both = ClockMapping(before, after)
    dist.barrier()
    return (before.seconds, before.error), both.drift


def test_clock_of_one_host_is_shared_and_drift_is_measured() -> None:
    """Ranks of one host share their clock, and a clock that runs too fast is found to drift."""
    (_, _), ((offset, error), drift) = run(measured, 1.0, ranks=2)
    assert abs(offset) <= error
    assert drift == 0
    (_, _), ((_, error), drift) = run(measured, 1.05, ranks=2)
    assert drift == pytest.approx(1 / 1.05 - 1, abs=0.01)


# ---- spans ----


def test_phases_fill_the_steps_without_gaps(replicas: Path) -> None:
    for ranked in read(replicas):
        found = phases(ranked)
        assert list(found) == list(range(STEPS[0], STEPS[1] + 1))
        line = [span for step in found.values() for span in step]
        assert [span.name for span in found[STEPS[0]]] == ["data", "forward", "backward", "communicate", "update"]
        assert [span.end for span in line[:-1]] == [span.begin for span in line[1:]]


def test_spans_lie_in_their_steps_and_host_spans_are_nested(replicas: Path) -> None:
    for ranked in read(replicas):
        bounds = {step: (own[0].begin, own[-1].end) for step, own in phases(ranked).items()}
        for span in ranked.spans:
            begin, end = bounds[span.step]
            assert begin <= span.begin <= span.end <= end + 1e-6, span
        nested([span for span in ranked.spans if span.lane == HOST])


def nested(spans: list[Span]) -> None:
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_spans and open_spans[-1].end <= span.begin:
            open_spans.pop()
        assert not open_spans or span.end <= open_spans[-1].end + 1e-6, (open_spans[-1], span)
        open_spans.append(span)


def bucket_bytes(replicas: Path) -> int:
    """Return the bytes of a bucket: gradients, a flag for each parameter, and other values that ride along."""
    first, second = json.loads((replicas / "buckets.json").read_text())
    assert first == second
    assert len(first) == 1
    return int(first[0])


def test_the_bytes_of_a_bucket_are_those_of_its_row(replicas: Path) -> None:
    size = bucket_bytes(replicas)
    assert size >= 4 * (16 * 24 + 24 + 24 * 4 + 4 + 4)
    for ranked in read(replicas):
        sums = [span for span in ranked.spans if span.lane == NETWORK and span.name == "sum of gradients"]
        assert [(span.step, span.bytes, span.ranks) for span in sums] == [
            (step, size, "0,1") for step in range(STEPS[0], STEPS[1] + 1)
        ]


def test_message_ends_share_a_key_and_end_after_all_have_begun(replicas: Path) -> None:
    """Both ends of a message have one key, and it arrives only after all ranks have begun it."""
    first, second = ({s.more["key"]: s for s in ranked.spans if s.lane == NETWORK} for ranked in read(replicas))
    assert first.keys() == second.keys()
    error = read(replicas)[1].about["clock_error"]
    for key, span in first.items():
        assert min(span.end, second[key].end) >= max(span.begin, second[key].begin) - 2 * error


# ---- figures ----


def test_the_parts_add_up_to_the_step(replicas: Path) -> None:
    for row in summarize(replicas)["ranks"]:
        parts = ("compute", "exposed", "bubble", "data", "server", "update", "other")
        assert sum(row[f"{part}_ms"] for part in parts) == pytest.approx(row["step_ms"], abs=1e-3)
        assert row["communicate_ms"] >= row["exposed_ms"] > 0
        assert row["bubble_ms"] == row["server_ms"] == 0


def test_sleeping_rank_is_slowest_and_the_other_waits_as_long(replicas: Path) -> None:
    """The rank that sleeps is the slowest one, and the other rank waits for it as long as it sleeps."""
    figures = summarize(replicas)
    quick, slow = figures["ranks"]
    assert figures["slowest"] == figures["waited_for"]["rank"] == 1
    difference = 1e3 * (SLOW - FAST)
    assert figures["slowest_ms"] == pytest.approx(difference, rel=0.5)
    assert quick["late_ms"] == pytest.approx(difference, rel=0.5)
    assert quick["exposed_ms"] >= quick["late_ms"]
    assert slow["late_ms"] < quick["late_ms"]
    assert slow["compute_ms"] >= 1e3 * SLOW
    assert figures["exposed_communication"] == pytest.approx(
        (quick["exposed_ms"] + slow["exposed_ms"]) / (quick["step_ms"] + slow["step_ms"])
    )
    assert figures["bubble"] is figures["mfu"] is None


def test_bandwidth_counts_from_when_all_are_there(replicas: Path) -> None:
    row = next(row for row in summarize(replicas)["communication"] if row["name"] == "sum of gradients")
    assert row["bytes"] == bucket_bytes(replicas)
    assert row["ms"] < 1e3 * SLOW, "waiting for the slow rank is no transfer"
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)


# ---- the trace ----


def traced(directory: Path) -> Any:
    with gzip.open(directory / "timeline" / "trace.json.gz") as file:
        return json.load(file)


def test_the_trace_is_one_for_all_ranks_and_keeps_to_the_rules(replicas: Path) -> None:
    trace = traced(replicas)
    slices = check_trace(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [name.split(",")[0] for name in names.values()] == ["rank 0", "rank 1"]
    assert all("replicate" in name for name in names.values())
    steps = [(event["pid"], event["tid"]) for event in slices if event["name"] == "step 3"]
    assert len(set(steps)) == 2, "one for each rank, in a thread of its own"
    assert len(slices) == sum(len(ranked.spans) + 3 for ranked in read(replicas))


# ---- a pipeline ----

TIMES = {("F", 0): 0.02, ("B", 0): 0.04, ("F", 1): 0.01, ("B", 1): 0.02}
MICRO_BATCHES = 4


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with echelon.pipeline(micro_batches=MICRO_BATCHES):
            with echelon.stage():
                self.lower = nn.Sequential(nn.Linear(16, 24), Slow(TIMES["F", 0], TIMES["B", 0]))
            with echelon.stage():
                self.upper = nn.Sequential(Slow(TIMES["F", 1], TIMES["B", 1]), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


def staged(directory: str) -> float:
    """Return the milliseconds that this rank has slept in a recorded step."""
    echelon.init()
    train(TwoStages(), directory, "3:5")  # it ends with the run
    recorded = SLEPT[len(SLEPT) * 2 // 5 :]  # each of the five steps sleeps equally often
    return 1e3 * sum(recorded) / 3


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pipeline")
    (directory / "slept.json").write_text(json.dumps(run(staged, str(directory), ranks=2)))
    return directory


def test_the_bubble_is_that_of_the_schedule(pipeline: Path) -> None:
    schedule = make_schedule("1f1b", 2, 2, MICRO_BATCHES)
    simulated = simulate(schedule, TIMES)
    idle = 1 - sum(simulated.busy) / (2 * simulated.makespan)
    bubble = summarize(pipeline)["bubble"]
    assert bubble["even"] == pytest.approx(1 / (MICRO_BATCHES + 1))
    assert bubble["theory"] == pytest.approx(idle, abs=0.08)
    assert bubble["measured"] == pytest.approx(bubble["theory"], abs=0.15)
    slept = json.loads((pipeline / "slept.json").read_text())
    for row in summarize(pipeline)["ranks"]:
        busy = 1e3 * simulated.busy[row["rank"]]
        assert slept[row["rank"]] >= busy
        assert row["compute_ms"] == pytest.approx(slept[row["rank"]], rel=0.5)
        assert row["bubble_ms"] >= 1e3 * simulated.makespan - 1.5 * slept[row["rank"]]


def test_every_action_of_the_schedule_is_there_in_its_order(pipeline: Path) -> None:
    schedule = make_schedule("1f1b", 2, 2, MICRO_BATCHES)
    for ranked in read(pipeline):
        for step in (3, 4, 5):
            own = [s for s in ranked.spans if s.step == step and "action" in s.more]
            actions = [(s.more["action"], s.more["micro"], s.more["stage"]) for s in sorted(own, key=lambda s: s.begin)]
            assert actions == list(schedule[ranked.rank])


def test_activations_travel_from_the_first_stage_to_the_second(pipeline: Path) -> None:
    ranks = read(pipeline)
    ends: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for ranked in ranks:
        for span in ranked.spans:
            if "at" in span.more:
                assert span.bytes is not None
                ends[span.more["key"]][span.more["at"]] = ranked.rank, span.bytes
    there = [both for both in ends.values() if both["receiver"][0] == 1]
    assert len(ends) == 2 * len(there) == 3 * 2 * MICRO_BATCHES
    assert all(both["sender"] == (0, 8 // MICRO_BATCHES * 24 * 4) for both in there)
    assert all(both["sender"][1] == both["receiver"][1] for both in ends.values())
    check_trace(traced(pipeline))


def test_messages_have_arrows_unless_clocks_are_wrong(pipeline: Path) -> None:
    """On a busy machine the error of the clocks may exceed the time of a message, which then ends before it begins."""
    ranks = read(pipeline)
    ends: defaultdict[str, dict[str, Span]] = defaultdict(dict)
    for ranked in ranks:
        for span in ranked.spans:
            if "at" in span.more:
                ends[span.more["key"]][span.more["at"]] = span
    late = [both["sender"].begin - both["receiver"].end for both in ends.values()]
    error = max(ranked.about["clock_error"] for ranked in ranks)
    assert max(late) <= 2 * error
    arrows = [event for event in trace_of(ranks)["traceEvents"] if event["ph"] in "sf"]
    assert len(arrows) == 2 * sum(seconds <= 0 for seconds in late)
    starts = {event["id"]: event["ts"] for event in arrows if event["ph"] == "s"}
    assert all(event["ts"] >= starts[event["id"]] for event in arrows if event["ph"] == "f")


# ---- what is damaged ----


def test_damaged_and_missing_files_are_left_out(pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.mkdir()
    whole = (pipeline / "timeline" / "rank-0.jsonl").read_text().splitlines()
    half = [*whole[:30], "{", "[]", '{"name": 1}', '{"lane": "host", "begin": "x"}', whole[30][:20]]
    (folder / "rank-0.jsonl").write_text("\n".join(half))
    (folder / "rank-1.jsonl").write_bytes(b"\xff\xfe not ours")
    (folder / "rank-2.jsonl").write_text("")
    os.mkfifo(folder / "rank-3.jsonl")
    found = trace_files.read(folder)
    assert [(ranked.rank, len(ranked.spans)) for ranked in found] == [(0, 29)]
    figures = merge(folder).figures
    assert [row["rank"] for row in figures["ranks"]] == [0]
    assert figures["bubble"] is None, "one rank alone is no pipeline"


# ---- what is killed ----

KILLED_IN = 6  # the step in which rank 1 ends; recorded are those from 3 on


def until(there: Any) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Ends(nn.Module):
    """Kills its process with -9: of all ranks, or of rank 1 once rank 0 has written down that it waits for it."""

    def __init__(self, who: str, directory: str) -> None:
        super().__init__()
        self._who, self._part, self._calls = who, Path(directory, "timeline", trace_files.part_name(0)), 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == KILLED_IN and (self._who == "all" or echelon.rank() == 1):
            if self._who == "one":
                until(lambda: '"under_way": [["communicate"' in self._part.read_text().splitlines()[-1])
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def killed(directory: str, who: str) -> None:
    echelon.init()
    train(nn.Sequential(nn.Linear(16, 4), Ends(who, directory)), directory, "3:20", steps=20)


def test_what_all_ranks_had_recorded_survives_kill_9(tmp_path: Path) -> None:
    assert run_raw(killed, str(tmp_path), "all", ranks=2) == [Died(-signal.SIGKILL)] * 2
    figures = summarize(tmp_path)
    assert figures["steps"] == [3, KILLED_IN - 1]
    assert [row["rank"] for row in figures["ranks"]] == [0, 1]
    cut = figures["cut"]
    assert (cut["asked"], cut["running"], cut["first"], cut["missing"]) == ([3, 20], False, None, [])
    assert [(row["step"], row["said"]) for row in cut["ranks"]] == [(KILLED_IN - 1, None)] * 2
    check_trace(traced(tmp_path))
    for ranked in read(tmp_path):
        assert {span.step for span in ranked.spans if span.lane == NETWORK} == set(range(3, KILLED_IN))


def test_a_rank_that_waited_for_the_killed_one_shows_for_what(tmp_path: Path) -> None:
    left, gone = run_raw(killed, str(tmp_path), "one", ranks=2)
    assert isinstance(left, Raised)
    assert gone == Died(-signal.SIGKILL)
    (waited, _) = summarize(tmp_path)["cut"]["ranks"]
    assert (waited["doing"][0]["step"], waited["doing"][0]["name"]) == (KILLED_IN, "communicate")
    waits = [span for span in read(tmp_path)[0].spans if span.step == KILLED_IN and span.kind == "wait"]
    assert [(wait.name, wait.ranks) for wait in waits] == [("sum of gradients", "0,1")]
    names = {event["name"] for event in check_trace(traced(tmp_path))}
    assert f"step {KILLED_IN}, cut short" in names
    last = (tmp_path / "timeline" / trace_files.part_name(1)).read_bytes()
    lines = last.splitlines(keepends=True)
    steps = [len(trace_files.read(tmp_path / "timeline")[1].spans)]
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):  # wherever the last line ends
        (tmp_path / "timeline" / trace_files.part_name(1)).write_bytes(last[:-cut])
        steps.append(len(trace_files.read(tmp_path / "timeline")[1].spans))
    assert steps[0] > steps[2] == steps[3] > 0
    (tmp_path / "timeline" / trace_files.part_name(1)).unlink()
    assert summarize(tmp_path)["cut"]["missing"] == [1]


# ---- what a run says ----


def said(directory: str, asked: str, done: int) -> str:
    import contextlib
    import io

    echelon.init()
    model = nn.Linear(16, 4)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = echelon.distribute(
            model,
            loss=F.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            log=echelon.Log(dir=directory, timeline=asked),
        )
        engine._run.progress.resume_at(done)
        for _ in range(6):
            engine.step(torch.ones(4, 16), torch.ones(4, 4))
        engine.close()
    return out.getvalue()


@pytest.mark.parametrize(
    ("asked", "done", "line"),
    [
        ("1:2", 0, "timeline of steps 1 to 2: "),
        ("3", 0, "timeline of step 3: "),
        ("auto", 0, "the run ended after step 6, before steps 11 to 15 began"),
        ("2:3", 10, "steps 2 to 3 lie before step 11, where this run has begun; nothing is recorded"),
        ("4:9", 0, "timeline: the run ended in steps 4 to 9; 'echelon timeline {there}' shows it"),
    ],
)
def test_what_became_of_the_wish_is_told(asked: str, done: int, line: str, tmp_path: Path) -> None:
    text = said(str(tmp_path), asked, done)
    assert line.format(there=tmp_path) in text
    recorded = {"1:2": [1, 2], "3": [3, 3], "4:9": [4, 6]}.get(asked)
    if recorded:
        assert summarize(tmp_path)["steps"] == recorded
    assert dist.ProcessGroup.allreduce.__name__ == "allreduce", "nothing is tapped any more"
    assert os.environ.get("ECHELON_TIMELINE") is None
