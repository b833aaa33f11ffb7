"""``ReplicaBuffers``: keeps buffers equal on replicas if each replica updates them from its own batch.

An example is a running mean of inputs; batch norm is handled elsewhere. Such buffers are found by comparing all buffers
in the first passes, and whenever the model is evaluated or saved. From then on they are averaged over replicas after
every pass, weighted by samples. The result equals that of one process if the update is linear in the mean of the batch
(``lerp_``) and follows the last use in forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.distributed.activity import waiting
from echelon.distributed.collectives import all_gather, gather_json
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.replicas import flatten, unflatten_into
from echelon.engine.run_context import RunContext
from echelon.plan import Plan
from echelon.plan.batch_norms import batch_norm_names
from echelon.plan.fake_forward import is_placeholder

Say = Callable[[str], None]

#: Number of first passes after which all buffers are compared.
FIRST_PASSES = 3


#: Most elements of a buffer whose order is compared; they are copied as float64.
MOST_WEIGHED = 2**20


class _Place(NamedTuple):
    """A buffer identified by module and key, because a forward pass may replace the tensor."""

    name: str
    module: nn.Module
    key: str

    @property
    def value(self) -> Tensor:
        result = self.module._buffers[self.key]
        assert result is not None
        return result


def replica_buffers(run: RunContext, plan: Plan, grid: MeshGroups) -> ReplicaBuffers | None:
    """Return the object that keeps buffers equal; None if there are no buffers or no replicas that share every step."""
    group, control, model = grid.group(*plan.data_axes), run.world.control, run.model
    has_any = bool(plan.sync_batch_norm) or next(_outside_of_norms(model), None) is not None
    if group is None or control is None or plan.local or not has_any:
        return None
    return ReplicaBuffers(model, group, control, run.checker.remarks, lambda line: run.say(line, "warning"))


def _outside_of_norms(model: nn.Module) -> Iterator[_Place]:
    norms = set(batch_norm_names(model))
    for name, module in model.named_modules():
        for key, value in module._buffers.items():
            if name not in norms and value is not None:
                yield _Place(f"{name}.{key}".removeprefix("."), module, key)


class ReplicaBuffers:
    """One rank's buffers outside of batch norms.

    group:   replicas of this rank's part of the model
    control: process group of all ranks
    remarks: warnings of this rank, which rank 0 logs after the first passes
    say:     writes a line on rank 0
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        remarks: list[str],
        say: Say,
    ) -> None:
        self._group = group
        self._control = control
        self._remarks = remarks
        self._say = say
        self._places = [place for place in _outside_of_norms(model) if _can_be_compared(place.value)]
        self._fed: list[_Place] = []
        self._left = FIRST_PASSES
        self.is_active = True  #: True if ``after_pass`` must be called after each pass

    def after_pass(self, samples: float) -> None:
        """Make buffers equal after a pass; ``samples`` is the number on this rank. All ranks call it."""
        if self._fed:
            self._average(samples)
        if self._left > 0:
            self._left -= 1
            self.compare(samples)
        self.is_active = self._left > 0 or bool(self._fed)

    def compare(self, samples: float = 1.0) -> None:
        """Find buffers that differ between replicas, log and average them. All ranks call it."""
        fed = [place for place, differs in zip(self._places, self._differing(), strict=True) if differs]
        new = [place for place in fed if place not in self._fed]
        new_remarks, self._remarks[:] = list(self._remarks), []
        facts = [(place.name, type(place.module).__name__) for place in new]
        found = gather_json([facts, new_remarks], self._control, "comparison of buffers")
        for line in dict.fromkeys(line for one in found for line in one[1]):
            self._say(line)
        for line in _lines({name: kind for one in found for name, kind in one[0]}):
            self._say(line)
        if new:
            self._fed += new
            self._average(samples)
            self.is_active = True

    def _differing(self) -> list[bool]:
        if not self._places:
            return []
        local = torch.stack([_fingerprint(place.value) for place in self._places])
        every = all_gather(local, self._group, "comparison of buffers").transpose(0, 1).tolist()
        return [any(not _is_same(one, prints[0]) for one in prints) for prints in every]

    @torch.no_grad()
    def _average(self, samples: float) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for place in self._fed:
            by_dtype.setdefault(place.value.dtype, []).append(place.value)
        for tensors in by_dtype.values():
            _average_by(tensors, samples, self._group)


def _average_by(tensors: Sequence[Tensor], samples: float, group: dist.ProcessGroup) -> None:
    """Replace tensors by their mean over replicas, weighted by samples; integers become those of the first replica."""
    flat = flatten(tensors)
    with waiting("average of buffers", "", group):
        if not (flat.is_floating_point() or flat.is_complex()):
            dist.broadcast(flat, group=group, group_src=0)
            unflatten_into(flat, tensors)
            return
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        wide = torch.cat([wide * samples if samples else torch.zeros_like(wide), wide.new_full((1,), samples)])
        dist.all_reduce(wide, group=group)
    unflatten_into((wide[:-1] / wide[-1]).to(flat.dtype), tensors)


def _can_be_compared(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and value.numel() > 0 and not is_placeholder(value)


def _fingerprint(value: Tensor) -> Tensor:
    """Return two numbers that are very unlikely to be equal for different tensors."""
    plain = (torch.view_as_real(value) if value.is_complex() else value).detach().flatten()
    plain = plain if plain.is_floating_point() else plain.float()
    order = torch.linspace(1.0, 2.0, min(plain.numel(), MOST_WEIGHED), dtype=torch.double, device=plain.device)
    weighed = torch.dot(order, plain[: order.numel()].double())  # detects permuted values
    return torch.stack([weighed, torch.linalg.vector_norm(plain, dtype=torch.double)])


def _is_same(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )


def _lines(fed: Mapping[str, str]) -> Iterator[str]:
    """Yield log lines on differing buffers; ``fed`` has the class of each buffer's module."""
    norms = {name: kind for name, kind in fed.items() if name.rpartition(".")[2] in _OF_NORMS}
    for kind in dict.fromkeys(norms.values()):
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in norms if norms[name] == kind))
        yield (
            f"batch norm: {_some(owners)} ({kind}) compute{'' if len(owners) > 1 else 's'} statistics without "
            "F.batch_norm; those of a step stay each replica's own, and running ones become their mean over replicas "
            "after every step"
        )
    if others := [name for name in fed if name not in norms]:
        yield (
            f"buffers: {_some(others)} differ{'' if len(others) > 1 else 's'} between replicas, fed by each one's own "
            "batch; after every step such a buffer becomes its mean over replicas, as in one process for a running "
            "mean that is read before it is fed"
        )


#: Names of the running statistics of a norm.
_OF_NORMS = ("running_mean", "running_var")


def _some(names: Sequence[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
