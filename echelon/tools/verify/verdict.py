"""From what the two runs have left to a verdict. Pure: a function of their answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from echelon.tools.verify.causes import likely_cause
from echelon.tools.verify.differences import TensorDifference, relative
from echelon.tools.verify.expected_differences import LOOSER, TOLERANCE, ExpectedDifference
from echelon.tools.verify.module_outputs import output_difference

Status = Literal["same", "expected", "differs", "cannot tell"]
What = Literal["outputs", "loss", "gradients", "replicas", "weights", "moves"]

#: An update that is off by more than this part of all that training has changed is another one, however small it is
#: beside the weights. Rounding is far below, but for what trust ratios of LAMB make of gradients that are zero.
ASTRAY = 0.25
#: Why agreeing with one process says little there.
ALIKE = (
    "all replicas were given the same samples in every step, and so was one process, once for each; let each rank have "
    "its own: take engine.loader(), or a sampler that goes by the rank"
)


@dataclass(frozen=True)
class LargestDifference:
    """Of all parameters, the one that is furthest apart."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class StepComparison:
    """One update. gradient: None where an overflow has skipped it; optimizer: which, in a loop with several"""

    step: int
    loss: float
    reference: float
    difference: float
    gradient: LargestDifference | None
    weight: LargestDifference | None
    optimizer: str = ""


@dataclass(frozen=True)
class Divergence:
    """Where the runs part first. where: a module or a parameter, "" for the loss; kind: the module's class; cause: what
    is likely to be behind it, from the losses of the replicas"""

    step: int
    what: What
    where: str
    kind: str
    difference: float
    hint: str = ""
    cause: str = ""


@dataclass(frozen=True)
class VerifyTolerances:
    """Relative differences that still count as the same."""

    outputs: float
    loss: float
    gradients: float
    weights: float
    moves: float

    @property
    def first_loss(self) -> float:
        """No update has touched it, whatever becomes of updates."""
        return min(self.outputs, self.loss)


@dataclass(frozen=True)
class Verdict:
    """status: "same", "expected" (not the same, and the strategy explains it), "differs" or "cannot tell"
    doubts:   why it cannot be told
    compared: how many of how many modules put out something that adds up over ranks, and was compared
    passes:   in how many one process took a global batch, and why
    stray:    what drew random numbers in a loop of its own that could not be followed
    alike:    all replicas were given the same samples
    unseen:   nothing of what a loop of its own takes in was seen
    wide:     the steps once more in 64 bits, where the runs parted in 32 and are the same there
    """

    status: Status
    rows: tuple[StepComparison, ...]
    parting: Divergence | None
    expected: tuple[ExpectedDifference, ...]
    ranks: int
    mesh: Mapping[str, int]
    tolerance: float
    compared: tuple[int, int]
    unrest: float
    silenced: tuple[str, ...]
    rounding: tuple[str, ...]
    options: str
    passes: int
    why: str
    wide: tuple[StepComparison, ...] = ()
    stray: tuple[str, ...] = ()
    unseen: bool = False
    alike: bool = False
    doubts: tuple[str, ...] = ()


def compare_runs(plan: Mapping[str, Any], reference: Mapping[str, Any], tolerance: float | None = None) -> Verdict:
    """``plan`` and ``reference``: answers of the recorder and the replayer. A tolerance that is given holds for all,
    whatever the strategy explains."""
    reasons = tuple(ExpectedDifference(**one) for one in plan["expected"])
    base = tolerance if tolerance is not None else TOLERANCE
    moves = math.inf if reasons else max(ASTRAY, LOOSER * base)
    exact = VerifyTolerances(base, base, LOOSER * base, LOOSER * base, moves)
    case = _RunComparison(plan, reference)
    parting = case.parting(exact)
    status: Status = "same" if parting is None else "differs"
    if parting is not None and tolerance is None and reasons:
        beyond = case.parting(_widened(exact, reasons))
        status, parting = ("expected", parting) if beyond is None else ("differs", beyond)
    doubts = _doubts(plan, reference)
    if doubts and (parting is None or (reference.get("doubts") and parting.what != "outputs")):
        status = "cannot tell"
    return Verdict(
        status=status,
        rows=tuple(case.rows()),
        parting=parting,
        expected=reasons,
        ranks=plan["ranks"],
        mesh=plan["mesh"],
        tolerance=base,
        compared=(len(case.outputs), len(reference["outputs"])),
        unrest=reference["unrest"],
        silenced=tuple(plan["silenced"]),
        rounding=tuple(reference["rounding"]),
        options=reference["options"],
        passes=reference["passes"],
        why=_why(plan),
        stray=tuple(sorted({*plan.get("stray", ()), *reference.get("stray", ())})),
        alike=bool(reference.get("alike")),
        unseen=bool(plan.get("own_loop")) and not plan["events"],
        doubts=doubts,
    )


def _doubts(plan: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[str, ...]:
    """Return why runs whose numbers agree need not be the same."""
    alike = (ALIKE,) if reference.get("alike") else ()
    return (*reference.get("doubts", ()), *alike, *plan.get("doubts", ()))


def _why(plan: Mapping[str, Any]) -> str:
    if plan["apart"]:
        return "reduction.op='sum' adds up the replicas' means"
    if plan["micro"] > 1:
        return "its batch norm or experts see micro-batches"
    return "the replicas' batches do not fit into one"


def _widened(exact: VerifyTolerances, reasons: Iterable[ExpectedDifference]) -> VerifyTolerances:
    def most(own: float, allowed: Iterable[float | None]) -> float:
        return max([own, *(math.inf if one is None else one for one in allowed)])

    reasons = list(reasons)
    return VerifyTolerances(
        outputs=most(exact.outputs, (one.outputs for one in reasons)),
        loss=most(exact.loss, (one.loss for one in reasons)),
        gradients=most(exact.gradients, (one.gradients for one in reasons)),
        weights=most(exact.weights, (one.weights for one in reasons)),
        moves=exact.moves,
    )


def apply_float64_verdict(verdict: Verdict, wide: Verdict) -> Verdict:
    """``wide``: of the same runs in 64 bits. Where they are the same, what parted in 32 bits was rounding."""
    return replace(verdict, status="same", wide=wide.rows) if wide.status == "same" else verdict


class _RunComparison:
    """The answers, side by side."""

    def __init__(self, plan: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
        self._plan, self._reference = plan, reference
        order = [name for name, _ in reference["outputs"]]
        self._place = {name: at for at, name in enumerate(order)}
        apart = {name: output_difference(plan["outputs"].get(name, (0,)), sums) for name, sums in reference["outputs"]}
        #: of modules that can be compared, in the order in which they are done
        self.outputs = {name: found for name, found in apart.items() if found is not None}

    def rows(self) -> Iterable[StepComparison]:
        for at, (mine, one) in enumerate(self._steps()):
            far = relative(mine["loss"], one["loss"])
            gradient, weight = _largest(one["gradients"]), _largest(one["weights"])
            yield StepComparison(at + 1, mine["loss"], one["loss"], far, gradient, weight, mine.get("optimizer", ""))

    def parting(self, limits: VerifyTolerances) -> Divergence | None:
        """The first thing beyond them, in the order in which a step computes it, with its likely cause."""
        found = self._parting(limits)
        if found is None:
            return None
        mine, one = list(self._steps())[found.step - 1]
        noisy = bool(self._reference["unrest"] or self._plan.get("stray") or self._reference.get("stray"))
        return replace(found, cause=likely_cause(mine, one, self._plan["replicas"], noisy=noisy))

    def _parting(self, limits: VerifyTolerances) -> Divergence | None:
        for name, far in self.outputs.items():
            if not far <= limits.outputs:  # nor is what is no number
                return Divergence(1, "outputs", name, self._kind(name), far)
        for at, (mine, one) in enumerate(self._steps()):
            found = self._in_step(at, mine, one, limits)
            if found is not None:
                return found
        return None

    def _in_step(
        self, at: int, mine: Mapping[str, Any], one: Mapping[str, Any], limits: VerifyTolerances
    ) -> Divergence | None:
        far = relative(mine["loss"], one["loss"])
        if not far <= (limits.first_loss if at == 0 else limits.loss):
            return Divergence(at + 1, "loss", "", "", far, _about_loss(mine))
        return (
            self._beyond(at, "gradients", one["gradients"], limits.gradients)
            or self._drifted(at, mine.get("drift"))
            or self._beyond(at, "weights", one["weights"], limits.weights)
            or self._beyond(at, "moves", {name: (far, far) for name, far in one["moves"].items()}, limits.moves)
        )

    def _beyond(self, at: int, what: What, found: Mapping[str, Sequence[float]], limit: float) -> Divergence | None:
        beyond = [name for name, apart in found.items() if not apart[1] <= limit]
        if not beyond:
            return None
        # backward begins at the loss: of gradients that part, the last layer's are the first to
        name = sorted(beyond, key=self._at)[-1 if what == "gradients" else 0]
        hint = "" if math.isfinite(found[name][1]) else "it is there on one side only, or not finite"
        return Divergence(at + 1, what, name, self._kind(name.rpartition(".")[0]), found[name][1], hint)

    def _drifted(self, at: int, drift: Sequence[Any] | None) -> Divergence | None:
        if not drift:
            return None
        name, far, one, other = drift
        hint = f"rank {other} has other values there than rank {one}"
        return Divergence(at + 1, "replicas", name, self._kind(name.rpartition(".")[0]), far, hint)

    def _at(self, parameter: str) -> int:
        """When the module that has it is done."""
        name = parameter
        while name:
            name = name.rpartition(".")[0]
            if name in self._place:
                return self._place[name]
        return -1

    def _kind(self, module: str) -> str:
        return str(self._reference["kinds"].get(module, ""))

    def _steps(self) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return zip(self._plan["steps"], self._reference["steps"], strict=True)


def _about_loss(step: Mapping[str, Any]) -> str:
    if _ragged(step) and len({count for _, count in step["shares"]}) == 1:
        return "the replicas' batches have different lengths, and count alike: give engine.update(samples=len(x))"
    return ""


def _ragged(step: Mapping[str, Any]) -> bool:
    """Whether the replicas' batches in a loop of its own had different lengths."""
    return len({rows for rows, _ in step.get("shares", ())}) > 1


def _largest(found: Mapping[str, Sequence[float]]) -> LargestDifference | None:
    if not found:
        return None
    name = max(found, key=lambda each: found[each][1])
    return LargestDifference(name, *TensorDifference(*found[name]))
