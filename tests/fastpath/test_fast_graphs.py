"""CUDA graphs without CUDA: what is captured, what is told apart from it, and that a graph never does something else.

In place of a captured pass stands a trace of its operations, which has Python's values written into it as a graph has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_fast import Blocks, planned, with_traits
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from echelon import Fast, Strategy
from echelon.fastpath import cuda_graphs as graphs
from echelon.fastpath import pass_timing
from echelon.fastpath.cuda_graph_capture import (
    CapturedStep,
    WarmupStep,
    _claiming_capture,
    find_side_effect,
    has_gradient_hooks,
    snapshot_attributes,
)
from echelon.fastpath.cuda_graphs import PATIENCE, TRIES, WARM_UP, CudaGraphRunner
from echelon.fastpath.graph_validation import GraphValidation, PassSnapshot, apart
from echelon.fastpath.guards import StepSignature
from echelon.fastpath.inspect import with_fast_path
from echelon.fastpath.pass_timing import GROUP, GROUPS, WATCHED, EagerTiming, GraphTimingComparison
from echelon.fastpath.policy import decide

# ---- what a captured step has written into it ----


def test_a_step_that_differs_from_the_captured_one_is_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    batch = (torch.ones(2, 4), {"scale": 2.0})
    signature = StepSignature(model, batch)
    assert signature.fits((torch.zeros(2, 4), {"scale": 2.0}))
    assert not signature.fits((torch.zeros(3, 4), {"scale": 2.0}))
    assert not signature.fits((torch.zeros(2, 4).double(), {"scale": 2.0}))
    assert not signature.fits((torch.zeros(2, 4), {"scale": 3.0}))
    assert not signature.fits((torch.zeros(2, 4), {"other": 2.0}))
    model[1].p = 0.4
    assert not signature.fits(batch)
    model[1].p = 0.5
    assert signature.fits(batch)
    model.eval()
    assert not signature.fits(batch)
    model.train()
    model[0].bias.requires_grad_(False)
    assert not signature.fits(batch)
    model[0].bias.requires_grad_(True)
    for hook in (model[0].weight.register_hook, model[0].weight.register_post_accumulate_grad_hook):
        handle = hook(print)
        assert not signature.fits(batch)
        handle.remove()
        assert signature.fits(batch)
    model[0].weight.data = model[0].weight.data.clone()
    assert not signature.fits(batch)


class Behind(nn.Module):
    """Leaves things behind in forward; which, it is told."""

    def __init__(self, what: str = "nothing") -> None:
        super().__init__()
        self.inner, self.what = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), what
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen, self.last = 0, list[Tensor](), torch.zeros(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.what == "calls":
            self.calls += 1
        if self.what == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.what == "seen":
            self.seen.append(x.detach())
        if self.what == "last":
            self.last = x.detach()
        if self.what == "inner.0.scale":
            self.inner[0].scale = 2.0
        if self.what == "inner.more":
            self.inner.add_module("more", nn.Identity())
        self.last.copy_(x.detach())  # contents may change
        return x


@pytest.mark.parametrize("what", ["nothing", "calls", "mean", "seen", "last", "inner.0.scale", "inner.more"])
def test_what_forward_leaves_behind_in_python_is_found(what: str) -> None:
    model = Behind(what)
    before = snapshot_attributes(model)
    model(torch.randn(8, 4))
    assert find_side_effect(before, snapshot_attributes(model)) == (None if what == "nothing" else what)


@pytest.mark.parametrize(
    "hook",
    [
        lambda model: model.head.weight.register_hook(print),
        lambda model: model.head.weight.register_post_accumulate_grad_hook(print),
        lambda model: model.layers[0].register_full_backward_hook(print),
        lambda model: model.layers[0].register_full_backward_pre_hook(print),
    ],
)
def test_hooks_on_gradients_are_found(hook: Callable[[nn.Module], Any]) -> None:
    model = Blocks()
    model.register_forward_hook(print)
    assert not has_gradient_hooks(model)
    handle = hook(model)
    assert has_gradient_hooks(model)
    handle.remove()
    assert not has_gradient_hooks(model)


class Stand:
    """In place of a captured pass where there are no CUDA graphs: ``program``, whatever the step is by now."""

    device = torch.device("cpu")

    def __init__(self, program: Callable[[Any], tuple[Tensor, Callable[..., None]]]) -> None:
        self._program = program
        self.loss = torch.zeros(())

    def take(self, batch: Any) -> None:
        self._batch = batch

    def replay(self, weight: Any) -> None:
        loss, backward = self._program(self._batch)
        backward(weight)
        self.loss = loss.detach()


@pytest.mark.parametrize("merged", [False, True])
def test_graph_validation_step_equals_eager_and_leaves_no_trace(merged: bool) -> None:
    """A step under validation equals the step as written, and nothing of the captured one remains."""

    def passed(model: nn.Module, proved: bool) -> list[Tensor]:
        def plain(batch: Tensor) -> tuple[Tensor, Callable[..., None]]:
            loss = model(batch).square().mean()
            return loss, lambda weight: (loss * weight).backward()

        proof = GraphValidation(model, Stand(plain), weight=2.0)  # type: ignore[arg-type]
        found = []
        torch.manual_seed(2)
        for batch, weight in zip(torch.randn(2, 8, 4), (3.0, torch.tensor(0.5)), strict=True):
            loss, backward = (proof.run if proved else lambda batch, plain: plain(batch))(batch, plain)
            backward(weight)
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(3)]
            if not merged:
                model.zero_grad()
        assert not proved or (proof.is_over and proof.objection() is None)
        return [*found, *(buffer.clone() for buffer in model.buffers())]

    runs = []
    for proved in (True, False):
        torch.manual_seed(0)
        runs.append(passed(Behind(), proved))
    assert len(runs[0]) == len(runs[1]) > 12
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["losses", "gradients", "buffers"])
def test_a_graph_that_does_something_else_is_found_out(what: str) -> None:
    torch.manual_seed(0)
    model, calls = Behind(), [0]

    def plain(batch: Tensor, late: float = 1.0) -> tuple[Tensor, Callable[..., None]]:
        loss = model(batch).square().mean() * (late if what == "losses" else 1.0)
        return loss, lambda weight: (loss * weight * (late if what == "gradients" else 1.0)).backward()

    def captured(batch: Tensor) -> tuple[Tensor, Callable[..., None]]:  # as a loss that counts its calls would be
        calls[0] += 1
        if what == "buffers" and calls[0] == 2:
            model.inner[1].running_mean.zero_()
        return plain(batch, late=1.05 if calls[0] == 2 else 1.0)

    proof = GraphValidation(model, Stand(captured), weight=1.0)  # type: ignore[arg-type]
    for batch in torch.randn(2, 8, 4):
        proof.run(batch, plain)[1](1.0)
    assert proof.objection() is not None
    assert str(proof.objection()).startswith(f"{what} of a captured step differ by ")


def test_graph_validation_detects_graph_reading_eager_leftovers() -> None:
    """A graph that only reads what the step as written left in memory is detected."""
    model, left = nn.Linear(4, 4), [0.0]

    def plain(batch: Tensor, scale: float | None = None) -> tuple[Tensor, Callable[..., None]]:
        left[0] = left[0] + 1.0 if scale is None else left[0]
        loss = model(batch).square().mean() * (left[0] if scale is None else scale)
        return loss, lambda weight: (loss * weight).backward()

    proof = GraphValidation(model, Stand(lambda batch: plain(batch, scale=left[0])), weight=1.0)  # type: ignore[arg-type]
    for batch in torch.randn(2, 8, 4):
        proof.run(batch, plain)[1](1.0)
    assert str(proof.objection()).startswith("losses of a captured step differ by ")


class Alike:
    def fits(self, batch: Any) -> bool:
        return batch == "alike"


def test_graph_fitting_no_step_dropped_and_retried_limited_times() -> None:
    """A graph that no step fits any more is given up and captured again, a limited number of times."""
    said: list[str] = []
    graphs = CudaGraphRunner(planned(Blocks())[0], Blocks(), None, said.append)
    for attempt in range(TRIES):
        assert graphs._phase is not None
        graphs._captured, graphs._phase = Alike(), None  # type: ignore[assignment]
        for _ in range(PATIENCE):
            assert len(said) == attempt
            assert graphs.run("other", lambda batch: (batch, print)) == ("other", print)
        assert graphs._captured is None
    assert graphs._phase is None
    assert len(said) == TRIES


def test_steps_that_fit_now_and_then_keep_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    capturing = CudaGraphRunner(planned(Blocks())[0], Blocks(), None, said.append)
    captured = Alike()
    capturing._captured, capturing._phase = captured, None  # type: ignore[assignment]
    monkeypatch.setattr(capturing, "_replay", lambda captured, batch, plain: ("replayed", print))
    for _ in range(3):
        for batch in ["other"] * (PATIENCE - 1) + ["alike"]:
            taken = capturing.run(batch, lambda batch: (batch, print))
            assert taken[0] == ("replayed" if batch == "alike" else "other")
    assert capturing._captured is captured
    assert said == []


@pytest.mark.parametrize(("compile", "advised"), [("blocks", True), ("whole", False), (False, False)])
def test_slow_host_without_graph_suggests_compile_whole(compile: Any, advised: bool) -> None:
    """If the host is slow and no graph helps, compile='whole' is suggested."""
    said: list[str] = []
    plan = with_fast_path(planned(Blocks())[0], decide(Fast(compile=compile), None, with_traits()))
    graphs = CudaGraphRunner(plan, Blocks(), None, said.append)
    graphs._leave_out("forward draws")
    assert ["compile='whole'" in line for line in said] == [advised]


def test_apart_weighs_small_tensors_against_all_ignores_overflow() -> None:
    """The distance measures small tensors against all of them and ignores overflow."""
    large, small = torch.full((100,), 10.0), torch.full((4,), 1e-4)
    assert apart([large, small], [large, small]) == 0
    assert apart([large, small], [large * 1.1, small]) == pytest.approx(0.1 / 1.01, rel=1e-3)
    assert apart([large, small], [large, -small]) < 1e-3
    assert apart([large, torch.tensor([torch.inf])], [large * 2, small[:1]]) == 0
    assert apart([large], [large * torch.nan]) == torch.inf
    assert apart([], []) == 0
    assert apart([torch.tensor([3 + 4j])], [torch.tensor([3 - 4j])]) == pytest.approx(8 / 5.05)


def test_pass_snapshot_restores_changes_and_keeps_new_tables() -> None:
    """State that a pass has changed is restored, and tables that it has made are kept."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.zeros(2))
    before = PassSnapshot(model, torch.device("cpu"))
    drawn = torch.rand(2)
    model(torch.randn(4, 2))
    model.table = torch.arange(4.0)  # a longer one
    model.register_buffer("new", torch.ones(3))
    before.restore()
    assert torch.rand(2).equal(drawn)
    assert [buffer.tolist() for buffer in model.buffers()] == [[0, 0], [1, 1], 0, [0, 1, 2, 3], [1, 1, 1]]


# ---- from the first step to the last ----


class Traced(CapturedStep):
    """A pass on the CPU, as the operations that it called when it was captured."""

    def __init__(self, model: nn.Module, *rest: Any) -> None:
        super().__init__(model, *rest)
        self.model = model

    def _capture(self) -> None:
        def step() -> tuple[Tensor, list[Tensor | None]]:
            return self._pass(), [parameter.grad for parameter in self._parameters]

        before = PassSnapshot(self.model, self.device)
        self._program = make_fx(step)()
        before.restore()  # tracing runs what it traces, capturing does not

    def _launch(self) -> None:
        loss, gradients = self._program()
        self._loss.copy_(loss)  # into the same memory each time, as a graph
        for mine, new in zip(self._gradients, gradients, strict=True):
            if mine is not None:
                mine.copy_(new)


class Lap:
    """Timings of a device that waits for the host, and of graphs that take half of the time."""

    behind, replayed, made = 0.0, 0.5, 0

    def __init__(self) -> None:
        group = (Lap.made - WATCHED) // (GROUP - 1)
        self._is_plain = Lap.made < WATCHED or group % 2 == 0
        Lap.made += 1

    def end(self) -> None: ...

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return 1.0 if self._is_plain else Lap.replayed

    def lag(self, clock: object) -> float:
        return Lap.behind


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_timing, "PassTimer", Lap)
    monkeypatch.setattr(pass_timing, "DeviceClock", object)
    monkeypatch.setattr(Lap, "made", 0)
    monkeypatch.setattr(graphs, "has_room", lambda device: True)
    monkeypatch.setattr(graphs, "CapturedStep", Traced)
    monkeypatch.setattr(graphs, "draws", lambda: None)  # here the host's random numbers are the device's
    monkeypatch.setattr(WarmupStep, "_played", lambda self: nullcontext())


class Weights:
    of_class = 1.0

    def __init__(self) -> None:
        self.of_object = 1.0


weights = Weights()
of_module = 1.0


class Net(nn.Module):
    late: float

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.ones(2))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("turns", torch.tensor([1j, -1j]))
        self.register_buffer("expanded", torch.ones(1).expand(2))
        self.plain, self.bent, self.best = torch.ones(2), nn.Identity(), float("nan")
        self.more, self.itself = nn.ModuleList(), list[Any]()
        self.itself.append(self.itself)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.bent(self.layers(x)) * self.scale * of_module * self.factors * self.plain * getattr(self, "late", 1.0)
        for module in self.more:
            x = module(x)
        return x


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() * weights.of_object * Weights.of_class


STEPS = WARM_UP + WATCHED + GROUP * GROUPS + 14
Change = Callable[[int, nn.Module, pytest.MonkeyPatch], Any]


def train(
    monkeypatch: pytest.MonkeyPatch, change: Change, sizes: list[int], with_graphs: bool, merge: int = 1
) -> tuple[Any, list[str]]:
    """Losses, weights and buffers, and what was said. ``change`` goes before each step."""
    said: list[str] = []
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    capturing = CudaGraphRunner(planned(Blocks(), Strategy(gradient_merge=merge))[0], model, weighted, said.append)

    def plain(batch: Any) -> tuple[Tensor, Callable[..., None]]:
        loss = weighted(model(batch[0]), batch[1])
        return loss, lambda weight: (loss * weight).backward()

    losses = []
    with monkeypatch.context() as patch:
        for at, size in enumerate(sizes):
            change(at, model, patch)
            batch = torch.randn(size, 4), torch.randn(size, 2)
            loss, backward = capturing.run(batch, plain) if with_graphs else plain(batch)
            backward(2.0)
            losses.append(loss.detach())
            if at % merge == merge - 1:
                optimizer.step()
                optimizer.zero_grad()
    return [*losses, *model.state_dict().values()], said


def nothing(at: int, model: nn.Module, patch: pytest.MonkeyPatch) -> None: ...


def late(where: Callable[[Any], Any], name: str, value: float = 3.0) -> Change:
    """A value that is set anew in the last steps."""
    return lambda at, model, patch: patch.setattr(where(model), name, value) if at == STEPS - 4 else None


def once(change: Callable[[Any], Any]) -> Change:
    """Something that is done to the model before one of the last steps."""
    return lambda at, model, patch: change(model) if at == STEPS - 4 else None


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


ONCE: dict[str, Callable[[Any], Any]] = {
    "a weight is another one": lambda model: setattr(model.layers[4], "bias", nn.Parameter(torch.ones(2))),
    "a buffer is another one": lambda model: setattr(model, "factors", torch.full((2,), 3.0)),
    "a buffer holds other numbers": lambda model: model.factors.fill_(3.0),
    "a tensor is another one": lambda model: setattr(model, "plain", torch.full((2,), 3.0)),
    "a module is another one": lambda model: setattr(model, "bent", nn.ReLU()),
    "a module is added": lambda model: model.more.append(nn.Tanh()),
    "an attribute is new": lambda model: setattr(model, "late", 2.0),
    "a number becomes a tensor": lambda model: setattr(model, "scale", torch.full((2,), 2.0)),
    "forward is another one": lambda model: setattr(model, "forward", lambda x: 5 * model.layers(x)),
    "the class is another one": lambda model: setattr(model, "__class__", Other),
}

CASES: dict[str, tuple[Change, list[int], str]] = {
    **{name: (once(change), [8] * STEPS, "are one CUDA graph now") for name, change in ONCE.items()},
    "a fixed program": (nothing, [8] * STEPS, "are one CUDA graph now"),
    "other sizes in between": (nothing, [8] * (STEPS - 5) + [5, 8, 3, 8, 8], "are one CUDA graph now"),
    "a global changes late": (
        late(lambda model: sys.modules[__name__], "of_module"),
        [8] * STEPS,
        "are one CUDA graph",
    ),
    "an object changes late": (late(lambda model: weights, "of_object"), [8] * STEPS, "are one CUDA graph now"),
    "a class changes late": (late(lambda model: Weights, "of_class"), [8] * STEPS, "are one CUDA graph now"),
    "a module changes late": (late(lambda model: model, "scale"), [8] * STEPS, "are one CUDA graph now"),
    "dropout changes late": (late(lambda model: model.layers[3], "p", 0.6), [8] * STEPS, "are one CUDA graph now"),
    "a weight is annealed": (
        lambda at, model, patch: patch.setattr(weights, "of_object", 1 + 0.001 * at),
        [8] * STEPS,
        "may read weights.of_object, which changes from step to step",
    ),
    "a gradient gets a hook late": (
        lambda at, model, patch: hooked(0, model, patch) if at == STEPS - 4 else None,
        [8] * STEPS,
        "are one CUDA graph now",
    ),
    "a layer is frozen late": (
        lambda at, model, patch: model.layers[0].requires_grad_(at < STEPS - 4),  # type: ignore[index]
        [8] * STEPS,
        "are one CUDA graph now",
    ),
}


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("case", CASES)
def test_training_with_graphs_equals_training_without(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, sizes, line = CASES[case]
    (found, said), (expected, _) = (train(monkeypatch, change, sizes, on) for on in (True, False))
    torch.testing.assert_close(found, expected)
    assert [line in one for one in said] == [True], said


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def hooked(at: int, model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    if at == 0:
        next(model.parameters()).register_hook(lambda gradient: gradient * 2)


LEFT_OUT: dict[str, tuple[dict[str, float], str, Change, list[str]]] = {
    "the device is slower": ({"behind": 0.2}, "Net", nothing, []),
    "the graph is slower": ({"replayed": 1.5}, "Net", nothing, ["take 1500.0 ms where they take 1000.0"]),
    "forward counts": ({}, "Counting", nothing, ["forward sets calls of the model, which a graph would not"]),
    "a gradient has a hook": ({}, "Net", hooked, ["hooks on gradients are Python, which a graph would not run"]),
}


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("case", LEFT_OUT)
def test_no_graph_runs_eager_steps_and_reports_only_if_slow_host(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no graph is made, steps run as written, and the reason is reported only if the host is slow."""
    lap, kind, change, lines = LEFT_OUT[case]
    for name, value in lap.items():
        monkeypatch.setattr(Lap, name, value)
    monkeypatch.setitem(globals(), "Net", globals()[kind])
    (found, said), (expected, _) = (train(monkeypatch, change, [8] * STEPS, on) for on in (True, False))
    torch.testing.assert_close(found, expected)
    assert len(said) == len(lines)
    assert all(line in one for line, one in zip(lines, said, strict=True)), said


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_merged_steps_with_graphs_add_up_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    (found, said), (expected, _) = (train(monkeypatch, nothing, [8] * STEPS, on, merge=3) for on in (True, False))
    torch.testing.assert_close(found, expected)
    assert ["are one CUDA graph now" in one for one in said] == [True], said


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("helps", [True, False])
def test_step_waiting_for_device_retried_as_told_of_capture(helps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the device is tried again while it is told that it is being captured."""
    told: list[bool] = []

    def played(rehearsal: WarmupStep) -> Any:
        rehearsal.waits = not (rehearsal.claimed and helps)
        return nullcontext()

    def captured(model: nn.Module, batch: Any, readings: Any, plain: Any, merges: bool, knows: bool) -> Traced:
        told.append(knows)
        return Traced(model, batch, readings, plain, merges, knows)

    monkeypatch.setattr(WarmupStep, "_played", played)
    monkeypatch.setattr(graphs, "CapturedStep", captured)
    (found, said), (expected, _) = (train(monkeypatch, nothing, [8] * (STEPS + 3), on) for on in (True, False))
    torch.testing.assert_close(found, expected)
    line = "are one CUDA graph now" if helps else "disabled: forward or backward synchronizes with the device"
    assert [line in one for one in said] == [True], said
    assert told == ([True] if helps else [])


def test_is_current_stream_capturing_returns_the_set_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the context torch reports the given answer about capturing; afterwards its own function is back."""
    before = torch.cuda.is_current_stream_capturing
    for captured in (True, False):
        with _claiming_capture(captured):
            assert torch.cuda.is_current_stream_capturing() is captured
        assert torch.cuda.is_current_stream_capturing is before


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize(("behind", "held_up"), [(0.0, True), (0.09, True), (0.11, False), (0.9, False)])
def test_eager_timing_device_done_with_host_means_host_bound(
    behind: float, held_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is done as soon as the host is has waited for the host."""
    monkeypatch.setattr(Lap, "behind", behind)
    watch = EagerTiming()
    for _ in range(WATCHED):
        assert not watch.is_full
        watch.run("batch", lambda batch: (torch.zeros(()), lambda weight: None))[1](1.0)
    assert watch.is_over()
    assert watch.is_host_bound() is held_up


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_timing_comparison_alternates_groups_skips_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways take turns in groups of steps, and the first step of each group is not timed."""
    monkeypatch.setattr(Lap, "made", WATCHED)
    contest, order = GraphTimingComparison(), ""
    for _ in range(GROUP * GROUPS):
        made = Lap.made
        kind, _ = contest.run(None, lambda batch: ("w", print), lambda batch: ("c", print))  # type: ignore[arg-type, return-value]
        order += str(kind).upper() if Lap.made > made else str(kind)
    assert order == "wWWWcCCC" * 2
    assert contest.is_over()
    assert contest.seconds() == (1.0, 0.5)
