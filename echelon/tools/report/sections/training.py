"""Section with curves over steps: loss, speed, time by part, learning rate, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from echelon.observability.runlog.run_reader import PHASES, Run, StepRecord
from echelon.tools.report.figures.curves import Chart, Point, Series, chart

#: Largest number of charts for evaluation results other than the loss, and for logged values.
MOST_RESULTS = 12


def charts(run: Run) -> list[Chart]:
    again = restarts(run)
    found = [_loss(run, again), _speed(run, again), _times(run), _rate(run)]
    return [each for each in (*found, *_results(run), *_logged(run)) if each is not None]


def restarts(run: Run) -> list[float]:
    """Return the first step after each restart."""
    times = [event.time for event in run.events if event.kind in ("restart", "resumed")]
    steps = {next((each.step for each in run.steps if (each.time or 0.0) > then), None) for then in times}
    first = run.steps[0].step if run.steps else 0
    return sorted(float(step) for step in steps if step is not None and step > first)


def _points(steps: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> list[Point]:
    return [(float(each.step), value(each)) for each in steps]


def _loss(run: Run, again: Sequence[float]) -> Chart | None:
    lines = [Series("loss", "s-0", _points(run.steps, lambda each: each.loss))]
    lines.append(Series("evaluated", "s-1", _result(run, "loss"), dots=True))
    return chart("loss", "Loss", "loss", lines, restarts=again)


def _speed(run: Run, again: Sequence[float]) -> Chart | None:
    there = [each for each in run.steps if each.examples_per_s is not None]
    line = Series("examples/s", "s-2", _points(there, lambda each: each.examples_per_s))
    if not there:
        stepped = [each for each in run.steps if each.steps_per_s is not None]
        line = Series("steps/s", "s-2", _points(stepped, lambda each: each.steps_per_s))
    return chart("speed", "Speed", line.name, [line], zero=True, restarts=again)


def _rate(run: Run) -> Chart | None:
    there = [each for each in run.steps if each.learning_rate is not None]
    line = Series("learning rate", "s-3", _points(there, lambda each: each.learning_rate))
    return chart("rate", "Learning rate", "learning rate", [line], zero=True)


def _times(run: Run) -> Chart | None:
    lines = []
    for phase in PHASES:
        there = [(float(each.step), each.phases[phase]) for each in run.steps if phase in each.phases]
        lines.append(Series(phase, f"p-{phase}", there))
    return chart("times", "Time of a step by part", "ms", lines, zero=True)


def _results(run: Run) -> Iterator[Chart | None]:
    names = dict.fromkeys(name for each in run.evaluations for name in each.results if name != "loss")
    for place, name in enumerate(list(names)[:MOST_RESULTS]):
        line = Series(name, f"s-{(place + 4) % 8}", _result(run, name), dots=True)
        yield chart(f"evaluation-{place}", f"Evaluation: {name}", name, [line])


def _result(run: Run, name: str) -> list[Point]:
    return [(float(each.step), each.results[name]) for each in run.evaluations if name in each.results]


def _logged(run: Run) -> Iterator[Chart | None]:
    """Yield a chart for each value that the script has logged."""
    names = dict.fromkeys(name for each in run.logged for name in each.results)
    for place, name in enumerate(list(names)[:MOST_RESULTS]):
        points = [(float(each.step), each.results[name]) for each in run.logged if name in each.results]
        yield chart(f"logged-{place}", f"Logged: {name}", name, [Series(name, f"s-{(place + 4) % 8}", points)])
