"""What one process of a data-parallel job holds: the peak, its moment, and every module's part; and what would save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn

from echelon.footprint.kept import LOSS, kept_by_module
from echelon.footprint.state import Given, bytes_of_step, named_optimizer, state_bytes
from echelon.planner.cost.memory import Fullest, fullest
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.draft import Draft
from echelon.planner.model.profile import Profile
from echelon.record.facts import Footprint, ModuleBytes, Saving
from echelon.strict import require, strict

#: What the peak is made of, as the planner's Memory names it.
KINDS = ("parameters", "gradients", "optimizer", "activations", "transient", "exchange", "buffers")
#: What is in no module of its own.
REST = "(model)"


@strict
class Job:
    """How it is trained.

    samples:   of each process's batch
    procs:     processes, which see different samples
    merge:     batches that make up one update
    recompute: blocks keep only what they are given
    amp:       forward and loss in 16 bits
    shard:     0 to 3: what the processes share out
    """

    samples: int
    procs: int = 1
    merge: int = 1
    recompute: bool = False
    amp: Literal["bf16", "fp16"] | None = None
    shard: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "procs", "merge"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(0 <= self.shard <= 3, self, "shard", "0, 1, 2 or 3")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """``64 samples on each of 2 processes, recompute, amp bf16, shard 1``"""
        each = f" on each of {self.procs} processes" if self.procs > 1 else ""
        options = (
            ("recompute", self.recompute),
            (f"amp {self.amp}", self.amp),
            (f"shard {self.shard}", self.shard),
            (f"{self.merge} batches an update", self.merge > 1),
        )
        words = [f"{self.samples} sample{'s' if self.samples > 1 else ''}{each}", *(word for word, on in options if on)]
        return ", ".join(words)

    @property
    def draft(self) -> Draft:
        return Draft(
            batch=self.samples * self.procs * self.merge,
            replicate=self.procs,
            micro_batches=self.merge,
            recompute=(True,) if self.recompute else (),
            amp=self.amp,
            shard=self.shard,
        )


def find_footprint(profile: Profile, job: Job, optimizer: Given | str) -> Footprint:
    """Of such a job. ``optimizer``: the model's own, or the name of one (see ``state.NAMED``)."""
    held = _Held(profile, optimizer)
    peak = held.peak(job)
    kinds = {kind: round(getattr(peak.memory, kind)) for kind in KINDS}
    total = sum(kinds.values())
    others = [(what, sum(held.kinds(other).values())) for what, other in alternatives(job)]
    savings = [Saving(what, total - other) for what, other in others if other < total]
    return Footprint(
        peak=total,
        moment=_in_words(profile, peak),
        kinds=kinds,
        modules=tuple(held.rows(job)),
        savings=tuple(sorted(savings, key=lambda saving: -saving.bytes)),
        measured=False,
    )


def alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    """The same training by other means, one at a time."""
    if not job.recompute:
        yield "recompute", dataclasses.replace(job, recompute=True)
    if job.amp is None:
        yield "amp bf16", dataclasses.replace(job, amp="bf16")
    for level in range(job.shard + 1, 4) if job.procs > 1 else ():
        yield f"shard {level}", dataclasses.replace(job, shard=level)
    if job.samples > 1:
        yield f"batch {job.samples // 2}", dataclasses.replace(job, samples=job.samples // 2)


class _Held:
    """A profile and what its optimizer keeps."""

    def __init__(self, profile: Profile, optimizer: Given | str) -> None:
        self._profile = profile
        self._units = [name for members in profile.members for name in members if name]
        self._state = self._state_of(optimizer)
        trained = sum(p.numel() for p in profile.model.parameters() if p.requires_grad)
        self._name = optimizer if isinstance(optimizer, str) else _kind(optimizer)
        each = sum(self._state.values()) / trained if trained else 0.0
        self._system: System = dataclasses.replace(ECHELON, state={self._name: each})

    def peak(self, job: Job) -> Fullest:
        found = fullest(self._profile, job.draft, system=self._system, optimizer=self._name, place=self._profile.device)
        return found[0]

    def kinds(self, job: Job) -> dict[str, int]:
        memory = self.peak(job).memory
        return {kind: round(getattr(memory, kind)) for kind in KINDS}

    def rows(self, job: Job) -> Iterator[ModuleBytes]:
        """Every unit, and every module outside of units that has anything, in the model's order."""
        model = self._profile.model
        recomputed = self._units if job.recompute else ()
        activations = self._summed(kept_by_module(self._profile, job.samples, job.amp, recomputed))
        parameters = self._summed(_weights(model, lambda p: p.numel() * p.element_size()))
        gradients = self._summed(_weights(model, lambda p: p.numel() * p.element_size() * p.requires_grad))
        optimizer = self._summed(_weights(model, lambda p: self._state[id(p)]))
        buffers = self._summed(_buffers(model))
        shared = [job.procs if job.shard >= level else 1 for level in (3, 2, 1)]
        names = [*dict.fromkeys(self._row(name) for name, _ in model.named_modules()), LOSS]
        for name in names:
            found = [kind.get(name, 0) for kind in (parameters, gradients, optimizer, activations, buffers)]
            if any(found):
                own = [value // ranks for value, ranks in zip(found, shared, strict=False)]
                yield ModuleBytes(name, *own, *found[3:])

    def _row(self, name: str) -> str:
        """The unit that a module is in, or itself."""
        inside = next((unit for unit in self._units if name == unit or name.startswith(f"{unit}.")), name)
        return inside or REST

    def _summed(self, by_module: dict[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, value in by_module.items():
            row = name if name == LOSS else self._row(name)
            found[row] = found.get(row, 0) + value
        return found

    def _state_of(self, optimizer: Given | str) -> dict[int, int]:
        parameters, known = list(self._profile.model.parameters()), dict[Any, int]()
        if not isinstance(optimizer, str):
            return {id(p): state_bytes(optimizer, p, known) for p in parameters}
        twin = named_optimizer(optimizer)
        group = twin.param_groups[0]
        return {id(p): bytes_of_step(twin, group, p, known) if p.requires_grad else 0 for p in parameters}


def _weights(model: nn.Module, size: Callable[[nn.Parameter], int]) -> dict[str, int]:
    """By the module that has it first."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + size(parameter)
    return found


def _buffers(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in model.named_buffers():
        owner = name.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + value.numel() * value.element_size()
    return found


def _in_words(profile: Profile, peak: Fullest) -> str:
    """``backward of layers.3``"""
    if peak.moment == "exchange":
        return "end of backward, when the last gradients leave"
    if peak.moment == "update" or peak.unit is None:
        return peak.moment
    name = profile.members[peak.unit][0]
    if not name:
        return f"{peak.moment} of the model"
    beyond = " and what follows it" if peak.unit == len(profile.members) - 1 else ""
    return f"{peak.moment} of {name}{beyond}"


def _kind(optimizer: Given) -> str:
    from echelon.planner.explain.script import kind_of

    return kind_of(optimizer)
