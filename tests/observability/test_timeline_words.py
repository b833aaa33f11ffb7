"""Timelines as figures of made-up spans, and the words around them; no processes."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.base.errors import UsageError
from echelon.base.recorded_steps import RecordedSteps, parse_steps
from echelon.cli.parsing import with_steps
from echelon.distributed.activity import activity
from echelon.observability.metrics import Log
from echelon.observability.trace import summarize, trace_files
from echelon.observability.trace.device_trace import device_spans, events_of
from echelon.observability.trace.flops import ModelCallHook, count_flops
from echelon.observability.trace.intervals import length, union, within, without
from echelon.observability.trace.merge import on_one_clock
from echelon.observability.trace.partial_file import now_line, read_part, spans_line
from echelon.observability.trace.perfetto import trace_of
from echelon.observability.trace.span import DEVICE, HOST, NETWORK, Span
from echelon.observability.trace.span_recorder import TraceRecorder
from echelon.observability.trace.summary import summarize as figures_of
from echelon.observability.trace.trace_files import RankTrace
from echelon.observability.trace.trace_report import timeline_words
from echelon.observability.trace.truncated import find_truncation

# ---- steps in words ----


def test_message_that_ends_before_it_begins_has_no_arrow() -> None:
    """The error of clocks may exceed the time of a message."""

    def message(at: str, begin: float, end: float) -> Span:
        return Span("send", "communicate", NETWORK, begin, end, 1, bytes=4, ranks="0, 1", more={"key": "a", "at": at})

    def arrows(sent: float) -> list[str]:
        ranks = [
            RankTrace(0, {}, [message("sender", sent, sent + 1.0)]),
            RankTrace(1, {}, [message("receiver", 0.0, 2.0)]),
        ]
        return [event["ph"] for event in trace_of(ranks)["traceEvents"] if event["ph"] in "sf"]

    assert arrows(sent=1.0) == ["s", "f"]
    assert arrows(sent=2.5) == []


def test_steps_are_named_by_number_or_come_after_the_warm_up() -> None:
    assert parse_steps("5:10", "--timeline", 0) == RecordedSteps(5, 10)
    assert parse_steps("7", "--timeline", 3) == RecordedSteps(7, 7)
    assert parse_steps("auto", "--timeline", 100) == RecordedSteps(111, 115)


@pytest.mark.parametrize("text", ["x", "5:", ":5", "0:3", "6:5", "1:2:3", "-1", ""])
def test_what_names_no_steps_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^Log\(timeline=...\) '{text}'.*write 5:10[^\n]*$"):
        Log(timeline=text)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--timeline a.py", "--timeline auto a.py"),
        ("--timeline 5:10 a.py", "--timeline 5:10 a.py"),
        ("--timeline 3:2 a.py", "--timeline 3:2 a.py"),
        ("--timeline --procs 2 a.py", "--timeline auto --procs 2 a.py"),
        ("--procs 2 --timeline -m a", "--procs 2 --timeline auto -m a"),
        ("--procs 2 a.py --timeline x", "--procs 2 a.py --timeline x"),
        ("--timeline=4 a.py", "--timeline=4 a.py"),
        ("-- --timeline", "-- --timeline"),
    ],
)
def test_a_bare_timeline_takes_nothing_from_the_words_behind_it(typed: str, read: str) -> None:
    assert with_steps(typed.split(), {"--timeline", "--procs"}) == read.split()


# ---- stretches of time ----


def test_intervals_agree_with_counting_moments() -> None:
    first, second = [(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 12.0)]

    def moments(intervals: list[tuple[float, float]]) -> set[int]:
        return {moment for begin, end in intervals for moment in range(int(begin), int(end))}

    assert moments(without(first, second)) == moments(first) - moments(second)
    assert moments(within(first, second)) == moments(first) & moments(second)
    assert moments(union([*first, *second])) == moments(first) | moments(second)
    assert length(union([(0.0, 1.0), (0.5, 2.0), (5.0, 5.0)])) == 2.0


# ---- figures of made-up spans ----


def host(name: str, begin: float, end: float, step: int = 1, kind: str | None = None) -> Span:
    return Span(name, kind or name, HOST, begin, end, step, more={} if kind else {"phase": True})


def kernel(name: str, begin: float, end: float, step: int, phase: str, kind: str = "kernel") -> Span:
    return Span(name, kind, DEVICE, begin, end, step, more={"in": phase, "stream": 7})


def step_of(begin: float, number: int, *more: Span) -> list[Span]:
    """One second of data, two of forward, three of backward, two of communication, one of update."""
    phases, at = [], begin
    for name, seconds in (("data", 1), ("forward", 2), ("backward", 3), ("communicate", 2), ("update", 1)):
        phases.append(host(name, at, at + seconds, number))
        at += seconds
    return [*phases, *more]


def row(spans: list[Span], **about: Any) -> dict[str, Any]:
    figures: dict[str, Any] = figures_of([RankTrace(0, {"ranks": 2, **about}, spans)])["ranks"][0]
    return {name.removesuffix("_ms"): round(value / 1e3, 6) for name, value in figures.items() if name != "rank"}


def test_on_a_cpu_waits_are_taken_out_of_their_phases() -> None:
    spans = step_of(
        0.0,
        1,
        host("wait for a batch", 0.2, 0.6, kind="data"),
        host("wait for a pull", 1.0, 1.5, kind="pull"),
        host("sum over the split", 3.5, 4.5, kind="wait"),
        host("sum of gradients", 6.5, 7.5, kind="wait"),
        host("receive activations", 2.0, 2.5, kind="bubble"),
    )
    found = row(spans)
    assert found["compute"] == 5 - 0.5 - 1 - 0.5
    assert found["exposed"] == 1 + 2
    assert (found["bubble"], found["server"], found["data"], found["update"]) == (0.5, 0.5, 0.4, 1)
    assert found["other"] == 0.6, "between two steps, besides waiting for the batch, is the user's code"
    assert found["step"] == 9


def test_without_a_loader_all_between_two_steps_is_data() -> None:
    assert row(step_of(0.0, 1))["data"] == 1


def test_gpu_figures_count_kernels_and_the_host_between_them() -> None:
    """On a GPU the figures count kernels, and the host only while no kernel runs."""
    spans = [
        *step_of(0.0, 1, host("sum of gradients", 6.5, 7.5, kind="wait")),
        *step_of(9.0, 2),
        kernel("gemm", 2.0, 6.0, 1, "forward"),
        kernel("ncclAllReduce", 5.0, 6.5, 1, "backward", "communicate"),
        kernel("adam", 9.0, 11.0, 1, "update"),  # runs on while the host is a step further
        kernel("gemm", 11.0, 19.0, 2, "forward"),
    ]
    figures = figures_of([RankTrace(0, {"ranks": 2}, spans)])["ranks"][0]
    assert figures["step_ms"] == pytest.approx(1e3 * 19 / 2), "from the last kernel of a step to that of the next"
    assert figures["compute_ms"] == pytest.approx(1e3 * (4 + 8) / 2)
    assert figures["update_ms"] == pytest.approx(1e3 * 2 / 2)
    assert figures["exposed_ms"] == pytest.approx(1e3 * (0.5 + 1.0) / 2), "NCCL alone, and the host's wait"
    assert figures["other_ms"] == pytest.approx(1e3 * (2.0 + 1.5) / 2), "the device had nothing to do"


def test_mfu_is_arithmetic_over_what_the_devices_promise() -> None:
    ranks = [
        RankTrace(rank, {"ranks": 2, "peak": 1e12, "host": "a", "device_index": rank}, step_of(0.0, 1))
        for rank in (0, 1)
    ]
    assert figures_of(ranks, flops=9e12)["mfu"] == pytest.approx(0.5)
    shared = [RankTrace(r.rank, {**r.about, "device_index": 0}, r.spans) for r in ranks]
    assert figures_of(shared, flops=4.5e12)["mfu"] == pytest.approx(0.5), "two ranks on one device"
    assert figures_of(ranks)["mfu"] is None
    told = [RankTrace(r.rank, {**r.about, "flops": 4.5e12}, r.spans) for r in ranks]
    assert figures_of(told)["mfu"] == pytest.approx(0.5)


def test_workers_that_never_met_have_the_time_of_day_in_common() -> None:
    span = host("forward", 5.0, 6.0)
    first = RankTrace(0, {"host": "a", "wall": 100.0, "clock_error": None}, [span])
    other = RankTrace(1, {"host": "b", "wall": 130.0, "clock_error": None}, [span])
    same = RankTrace(2, {"host": "a", "wall": 100.5, "clock_error": None}, [span])
    assert [ranked.spans[0].begin for ranked in on_one_clock([first, other, same])] == [5.0, 35.0, 5.0]


def test_arithmetic_is_counted_without_a_trace_in_the_training() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 4, bias=False))
    recorder = TraceRecorder(1)
    ModelCallHook(model, recorder)
    model(torch.randn(8, 16))
    model(torch.randn(2, 16))  # only the first is counted
    assert recorder.arguments is not None
    random, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    assert count_flops(model, recorder.arguments, None, torch.device("cpu")) == 3 * 2 * 8 * (16 * 24 + 24 * 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert count_flops(model, ((), {}), None, torch.device("cpu")) is None
    assert not model._forward_pre_hooks


def test_recorded_step_has_the_model_arguments_without_a_hook() -> None:
    """A recorded step tells the arguments that the model is called with, and needs no hook for it."""
    model = nn.Linear(4, 2)
    engine = echelon.distribute(
        model,
        loss=lambda output, batch: output.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        log=echelon.Log(console=False),
    )
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for step, (args, named) in (
        (lambda: engine.step(x, y), ((x,), {})),
        (lambda: engine.step(input=x, y=y), ((), {"input": x})),
    ):
        step()
        activity.recorder = recorder = TraceRecorder(2)
        try:
            step()
        finally:
            activity.recorder = None
        assert recorder.arguments is not None
        assert [id(one) for one in recorder.arguments[0]] == [id(one) for one in args]
        assert {key: id(one) for key, one in recorder.arguments[1].items()} == {key: id(v) for key, v in named.items()}
    assert not engine._passes.has_own_loop
    engine.backward(model(x).square().mean())
    engine.update()
    assert engine._passes.has_own_loop


# ---- a GPU's trace ----


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    """Write events as torch does: microseconds since a base; launches and kernels share a correlation number."""

    def event(cat: str, name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
        return {
            "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur,
            "args": {"correlation": correlation, "stream": 7},
        }  # fmt: skip

    told = {
        "baseTimeNanoseconds": 1_000_000_000,
        "traceEvents": [
            event("cuda_runtime", "cudaLaunchKernel", 1.5e6, 10, 1),
            event("kernel", "gemm", 4.5e6, 1e6, 1),  # runs three seconds after its launch
            event("cuda_runtime", "cudaLaunchKernel", 40e6, 10, 2),
            event("kernel", "late", 41e6, 1e6, 2),  # launched after the recording
            event("cuda_runtime", "cudaMemcpyAsync", 8.2e6, 10, 3),
            event("gpu_memcpy", "Memcpy HtoD", 8.3e6, 1e5, 3),
            event("cpu_op", "aten::mm", 1.5e6, 10, 4),
            {"ph": "M", "name": "process_name"},
        ],
    }
    events = events_of(told, behind=-1.0)
    assert len(events) == 6
    spans = device_spans(events, step_of(0.0, 3))
    assert [(s.name, s.more["in"], s.step, round(s.begin, 6), "copy" in s.more) for s in spans] == [
        ("gemm", "forward", 3, 4.5, False),
        ("Memcpy HtoD", "update", 3, 8.3, True),
    ]


# ---- what was cut short ----

PHASES = step_of(0.0, 1)


def part(rank: int, *lines: str, **about: Any) -> RankTrace:
    """A rank of two that began at second 0 of the run's clock, 100 s behind its own."""
    told = {"rank": rank, "ranks": 2, "clock_offset": 100.0, "asked": [1, 9], "began": 1000.0, **about}
    return RankTrace(rank, told, *read_part(told, map(json.loads, lines)))


def under_way(at: float, *doing: Span, **said: Any) -> str:
    return now_line(at, doing, **said)


def test_part_is_read_on_the_common_clock_with_open_spans_marked() -> None:
    """A part is read back on the clock of all ranks, and spans that were under way are marked as cut."""
    waits = host("sum of gradients", 9.5, 12.0, 2, "wait")
    found = part(0, spans_line(PHASES), under_way(10.0, host("forward", 9.0, 10.0, 2, "other")), under_way(12.0, waits))
    assert [span.begin for span in found.spans] == [*(100 + span.begin for span in PHASES), 109.5]
    assert found.ending is not None
    assert (found.ending.at, found.ending.said) == (112.0, None)
    assert [(span.name, span.more) for span in found.ending.doing] == [("sum of gradients", {"cut": True})]
    gone_on = part(0, under_way(10.0, waits), spans_line(PHASES))
    assert gone_on.ending is not None
    assert gone_on.ending.doing == (), "it has gone on since"


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([{"said": "ValueError: x"}, {"said": "PeerLost: y", "lost": True}], 0),
        ([{"said": "PeerLost: y", "lost": True}, {}], 1),
        ([{}, {}], None),
        ([{"said": ""}, {"said": ""}], None),
    ],
)
def test_who_stopped_first_is_told_where_it_is_sure(ends: list[dict[str, Any]], first: int | None) -> None:
    ranks = [part(rank, spans_line(PHASES), under_way(9.5, **end)) for rank, end in enumerate(ends)]
    cut = find_truncation(ranks)
    assert cut is not None
    assert cut["first"] == first
    silent = find_truncation([part(0, spans_line(PHASES), under_way(20.0)), part(1, spans_line(PHASES))])
    assert silent is not None
    assert silent["first"] == 1, "eleven seconds before the other"
    assert [row["silent_ms"] for row in silent["ranks"]] == [0.0, 11e3]


@pytest.mark.parametrize(("ago", "running"), [(0.0, True), (1e6, False)])
def test_later_process_with_the_same_pid_is_not_the_rank(ago: float, running: bool) -> None:
    """A later process that has the rank's process id is not taken for the rank."""
    found = part(0, spans_line(PHASES))
    about = {**found.about, "host": platform.node(), "pid": os.getpid(), "began": time.time() - ago}
    cut = find_truncation([replace(found, about=about)])
    assert cut is not None
    assert cut["running"] is running


def test_words_of_a_cut_name_progress_and_the_launchers_message(tmp_path: Path) -> None:
    """The text names how far each rank came and the launcher's message."""
    folder = tmp_path / "timeline"
    folder.mkdir()
    about = {"ranks": 3, "clock_offset": 0.0, "asked": [1, 9], "began": 1000.0}
    forward = host("forward", 10.0, 13.0, 2, "other")
    waiting = [host("update", 10.0, 13.0, 2, "other"), Span("sum", "wait", HOST, 11.0, 13.0, 2, ranks="0-2")]
    lines = {0: under_way(13.0, *waiting), 1: under_way(13.0, forward, said="ValueError: bad label")}
    for rank, line in lines.items():
        text = trace_files.first_line({"rank": rank, **about}) + spans_line(PHASES) + line + '[["forw'
        (folder / trace_files.part_name(rank)).write_text(text)
    event = {"time": 1010.0, "kind": "failed", "rank": 1, "text": "rank 1 of 3 raised ValueError: bad label"}
    (tmp_path / "events.jsonl").write_text(json.dumps({**event, "time": 10.0, "rank": 0}) + "\n" + json.dumps(event))
    assert timeline_words(str(tmp_path), as_json=False).splitlines()[:5] == [
        "cut short: steps 1 to 9 requested; all ranks completed step 1; rank 1 stopped first",
        "the launcher said: rank 1 of 3 raised ValueError: bad label",
        "  rank 0: step 1 done; then 3 s in update of step 2, 2 s of it in 'sum' with ranks 0-2; no record after that",
        "  rank 1: step 1 done; then 3 s in forward of step 2; it ended with ValueError: bad label",
        "  rank 2: no records here; they are on the disk of another host, or were never begun",
    ]
    assert "step 1, 2 ranks: 9 s a step (median)" in timeline_words(str(tmp_path), as_json=False)


def test_parts_of_a_crash_are_kept_when_the_next_attempt_records(tmp_path: Path) -> None:
    """The parts of a crash are moved aside when the next attempt records."""
    folder = tmp_path / "timeline"
    written(tmp_path)
    (folder / trace_files.part_name(1)).write_text(
        trace_files.first_line({"rank": 1, "clock_offset": 0.0}) + spans_line(PHASES)
    )
    trace_files.forget(folder, beyond=2)
    for rank in (0, 1):
        trace_files.make_way(folder, rank)
    assert not trace_files.of_ranks(folder)
    written(tmp_path)
    assert f"'echelon timeline {folder / trace_files.UNFINISHED}' shows it" in timeline_words(
        str(tmp_path), as_json=False
    )
    assert summarize(folder / trace_files.UNFINISHED)["cut"]["ranks"][0]["step"] == 1
    trace_files.make_way(folder, 1)
    assert not trace_files.of_ranks(folder / trace_files.UNFINISHED), "a crash before the last one is told no more"


# ---- the command ----


def written(directory: Path) -> Path:
    about = {"rank": 0, "host": "a", "clock_offset": 0.0, "clock_error": 0.0, "steps": [1, 1], "ranks": 1}
    trace_files.write(directory / "timeline", "rank-0.jsonl", trace_files.lines_of(about, step_of(0.0, 1)).encode())
    return directory


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"step": 10}\n')  # the run's own file of that name
    text = timeline_words(str(written(tmp_path)), as_json=False)
    assert "step 1, 1 rank: 9 s a step (median)" in text
    assert "trace.json.gz" in text
    told = json.loads(timeline_words(str(tmp_path), as_json=True))
    assert told == summarize(tmp_path) == json.loads((tmp_path / "timeline" / "summary.json").read_text())
    assert summarize(tmp_path / "timeline") == told, "the folder itself may be given"


def test_flops_that_the_run_wrote_down_are_used(tmp_path: Path) -> None:
    about = {"rank": 0, "clock_offset": 0.0, "ranks": 1, "peak": 1e12}
    trace_files.write(tmp_path / "timeline", "rank-0.jsonl", trace_files.lines_of(about, step_of(0.0, 1)).encode())
    assert summarize(tmp_path)["mfu"] is None
    (tmp_path / "run.json").write_text('{"flops_per_step": 4.5e12}')
    assert summarize(tmp_path)["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (False, "'{there}' does not exist; name the log directory of a run (by default the newest in 'runs')"),
        (True, "there is no timeline in '{there}'; record one by 'echelon run --timeline ...'"),
    ],
)
def test_where_there_is_no_timeline_one_line_says_so(made: bool, line: str, tmp_path: Path) -> None:
    there = tmp_path / "run"
    if made:
        there.mkdir()
    with pytest.raises(UsageError) as caught:
        timeline_words(str(there), as_json=False)
    assert str(caught.value) == line.format(there=there)
