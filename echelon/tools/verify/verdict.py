"""Verdict of ``echelon verify``: a pure function of the answers of the two runs."""

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

#: An update that differs by more than this fraction of the total change by training is a different update, however
#: small it is relative to the weights. Rounding errors are far smaller, except where LAMB's trust ratio scales
#: gradients that are zero.
ASTRAY = 0.25
#: Explanation why agreement with one process is inconclusive if all replicas had the same samples.
ALIKE = (
    "all replicas were given the same samples in every step, and so was one process, once for each; let each rank have "
    "its own: take engine.loader(), or a sampler that goes by the rank"
)


@dataclass(frozen=True)
class LargestDifference:
    """The parameter with the largest relative difference."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class StepComparison:
    """The comparison of one update.

    gradient:  None if the update was skipped because of an overflow
    optimizer: name of the optimizer, in a loop with several
    """

    step: int
    loss: float
    reference: float
    difference: float
    gradient: LargestDifference | None
    weight: LargestDifference | None
    optimizer: str = ""


@dataclass(frozen=True)
class Divergence:
    """The first point at which the runs differ.

    where: a module or a parameter, "" for the loss
    kind:  the class of the module
    cause: the likely cause, derived from the losses of the replicas
    """

    step: int
    what: What
    where: str
    kind: str
    difference: float
    hint: str = ""
    cause: str = ""


@dataclass(frozen=True)
class VerifyTolerances:
    """The largest relative differences that still count as the same."""

    outputs: float
    loss: float
    gradients: float
    weights: float
    moves: float

    @property
    def first_loss(self) -> float:
        """The tolerance of the first loss, which no update has affected."""
        return min(self.outputs, self.loss)


@dataclass(frozen=True)
class Verdict:
    """The result of ``echelon verify``.

    status:   "same", "expected" (not the same, and the strategy explains it), "differs" or "cannot tell"
    parting:  the first difference; None if there is none
    expected: the differences that the strategy explains
    compared: number of modules whose outputs could be summed over ranks and compared, and number of all modules
    unrest:   relative difference of two losses of one batch with different seeds
    silenced: modules in which dropout was switched off
    rounding: parameters whose gradients are mostly rounding error
    options:  a setting that the script gives one process and not the ranks
    passes:   number of passes in which one process computed a global batch; ``why`` is the reason
    wide:     the steps of a second comparison in float64, if the runs differ in fp32 and are the same in float64
    stray:    functions that drew random numbers that could not be replayed
    unseen:   True if no input of a custom loop was seen
    alike:    True if all replicas were given the same samples
    doubts:   reasons for "cannot tell"
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
    """Compare the answers of the two runs and return the verdict.

    plan:      answer of ``VerifyRecorder``
    reference: answer of ``VerifyReplayer``
    tolerance: relative difference that counts as the same, whatever the strategy explains; default ``TOLERANCE``
    """
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
    """Return the reasons why runs whose numbers agree need not be equivalent."""
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
    """Return ``verdict`` with status "same" if the runs are the same in float64: the fp32 difference was rounding.

    wide: verdict of the same runs in float64
    """
    return replace(verdict, status="same", wide=wide.rows) if wide.status == "same" else verdict


class _RunComparison:
    """Compares the answers of the two runs step by step."""

    def __init__(self, plan: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
        self._plan, self._reference = plan, reference
        order = [name for name, _ in reference["outputs"]]
        self._place = {name: at for at, name in enumerate(order)}
        apart = {name: output_difference(plan["outputs"].get(name, (0,)), sums) for name, sums in reference["outputs"]}
        #: output differences of the modules that can be compared, in the order in which their forwards end
        self.outputs = {name: found for name, found in apart.items() if found is not None}

    def rows(self) -> Iterable[StepComparison]:
        for at, (planned, one) in enumerate(self._steps()):
            far = relative(planned["loss"], one["loss"])
            gradient, weight = _largest(one["gradients"]), _largest(one["weights"])
            yield StepComparison(
                at + 1, planned["loss"], one["loss"], far, gradient, weight, planned.get("optimizer", "")
            )

    def parting(self, limits: VerifyTolerances) -> Divergence | None:
        """Return the first difference beyond ``limits``, in the order of computation, with its likely cause."""
        result = self._parting(limits)
        if result is None:
            return None
        planned, one = list(self._steps())[result.step - 1]
        noisy = bool(self._reference["unrest"] or self._plan.get("stray") or self._reference.get("stray"))
        return replace(result, cause=likely_cause(planned, one, self._plan["replicas"], noisy=noisy))

    def _parting(self, limits: VerifyTolerances) -> Divergence | None:
        for name, far in self.outputs.items():
            if not far <= limits.outputs:  # "not <=" is also true for NaN
                return Divergence(1, "outputs", name, self._kind(name), far)
        for at, (planned, one) in enumerate(self._steps()):
            result = self._in_step(at, planned, one, limits)
            if result is not None:
                return result
        return None

    def _in_step(
        self, at: int, planned: Mapping[str, Any], one: Mapping[str, Any], limits: VerifyTolerances
    ) -> Divergence | None:
        far = relative(planned["loss"], one["loss"])
        if not far <= (limits.first_loss if at == 0 else limits.loss):
            return Divergence(at + 1, "loss", "", "", far, _about_loss(planned))
        return (
            self._beyond(at, "gradients", one["gradients"], limits.gradients)
            or self._drifted(at, planned.get("drift"))
            or self._beyond(at, "weights", one["weights"], limits.weights)
            or self._beyond(at, "moves", {name: (far, far) for name, far in one["moves"].items()}, limits.moves)
        )

    def _beyond(self, at: int, what: What, found: Mapping[str, Sequence[float]], limit: float) -> Divergence | None:
        beyond = [name for name, apart in found.items() if not apart[1] <= limit]
        if not beyond:
            return None
        # backward begins at the loss, so the gradient of the last layer is the first that can differ
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
        """Return the position of the parameter's module in the order in which forwards end; -1 if unknown."""
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
    """Return True if the replicas' batches in a custom loop had different lengths."""
    return len({rows for rows, _ in step.get("shares", ())}) > 1


def _largest(found: Mapping[str, Sequence[float]]) -> LargestDifference | None:
    if not found:
        return None
    name = max(found, key=lambda each: found[each][1])
    return LargestDifference(name, *TensorDifference(*found[name]))
