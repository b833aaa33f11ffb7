"""Section with curves over steps: loss, speed, time by part, learning rate, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from echelon.observability.runlog.run_reader import Run, StepRecord
from echelon.observability.runlog.step_phases import PHASES
from echelon.tools.report.figures.curves import Chart, Point, Series, chart

#: Largest number of charts for evaluation results other than the loss, and for logged values.
MOST_RESULTS = 12


def charts(run: Run) -> list[Chart]:
    frame = Frame([float(each.step) for each in (*run.steps[:1], *run.steps[-1:])], restarts(run))
    found = [_loss(run, frame), _speed(run, frame), _tokens(run, frame), _mfu(run, frame), _times(run, frame)]
    found += [_rate(run, frame), _norm(run, frame)]
    return [each for each in (*found, *_results(run, frame), *_logged(run, frame)) if each is not None]


@dataclass(frozen=True)
class Frame:
    """The horizontal scale of all curves of a run: its first and last step, and its restarts."""

    reach: list[float]
    again: list[float]


def restarts(run: Run) -> list[float]:
    """Return the first step after each restart."""
    times = [event.time for event in run.events if event.kind in ("restart", "resumed")]
    steps = {next((each.step for each in run.steps if (each.time or 0.0) > then), None) for then in times}
    first = run.steps[0].step if run.steps else 0
    return sorted(float(step) for step in steps if step is not None and step > first)


def _points(steps: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> list[Point]:
    return [(float(each.step), value(each)) for each in steps]


def _loss(run: Run, frame: Frame) -> Chart | None:
    lines = [Series("loss", "s-0", _points(run.steps, lambda each: each.loss))]
    lines.append(Series("evaluated", "s-1", _result(run, "loss"), dots=True))
    return chart("loss", "Loss", "loss", lines, reach=frame.reach, restarts=frame.again)


def _speed(run: Run, frame: Frame) -> Chart | None:
    there = [each for each in run.steps if each.examples_per_s is not None]
    line = Series("examples/s", "s-2", _points(there, lambda each: each.examples_per_s))
    if not there:
        stepped = [each for each in run.steps if each.steps_per_s is not None]
        line = Series("steps/s", "s-2", _points(stepped, lambda each: each.steps_per_s))
    return chart("speed", "Speed", line.name, [line], zero=True, reach=frame.reach, restarts=frame.again)


def _tokens(run: Run, frame: Frame) -> Chart | None:
    there = [each for each in run.steps if each.tokens_per_s is not None]
    line = Series("tokens/s", "s-2", _points(there, lambda each: each.tokens_per_s))
    return chart("tokens", "Tokens", line.name, [line], zero=True, reach=frame.reach, restarts=frame.again)


def _mfu(run: Run, frame: Frame) -> Chart | None:
    there = [each for each in run.steps if each.mfu is not None]
    line = Series("MFU", "s-4", _points(there, lambda each: None if each.mfu is None else 100 * each.mfu))
    return chart("mfu", "Part of the peak arithmetic", "%", [line], zero=True, reach=frame.reach)


def _rate(run: Run, frame: Frame) -> Chart | None:
    there = [each for each in run.steps if each.learning_rate is not None]
    line = Series("learning rate", "s-3", _points(there, lambda each: each.learning_rate))
    return chart("rate", "Learning rate", "learning rate", [line], zero=True, reach=frame.reach)


def _norm(run: Run, frame: Frame) -> Chart | None:
    line = Series("before clipping", "s-6", _points(run.steps, lambda each: each.gradient_norm))
    return chart("norm", "Gradient norm", "norm", [line], reach=frame.reach, restarts=frame.again)


def _times(run: Run, frame: Frame) -> Chart | None:
    lines, counted = [], run.steps[1:] or run.steps  # the first record includes the setup
    for phase in PHASES:
        there = [(float(each.step), each.phases[phase]) for each in counted if phase in each.phases]
        lines.append(Series(phase, f"k-{phase}", there))
    return chart("times", "Time of a step by part", "ms", lines, zero=True, reach=frame.reach)


def _results(run: Run, frame: Frame) -> Iterator[Chart | None]:
    names = dict.fromkeys(name for each in run.evaluations for name in each.results if name != "loss")
    for place, name in enumerate(list(names)[:MOST_RESULTS]):
        line = Series(name, f"s-{(place + 4) % 8}", _result(run, name), dots=True)
        yield chart(f"evaluation-{place}", f"Evaluation: {name}", name, [line], reach=frame.reach)


def _result(run: Run, name: str) -> list[Point]:
    return [(float(each.step), each.results[name]) for each in run.evaluations if name in each.results]


def _logged(run: Run, frame: Frame) -> Iterator[Chart | None]:
    """Yield a chart for each value that the script has logged."""
    names = dict.fromkeys(name for each in run.logged for name in each.results)
    for place, name in enumerate(list(names)[:MOST_RESULTS]):
        points = [(float(each.step), each.results[name]) for each in run.logged if name in each.results]
        line = Series(name, f"s-{(place + 4) % 8}", points)
        yield chart(f"logged-{place}", f"Logged: {name}", name, [line], reach=frame.reach)
