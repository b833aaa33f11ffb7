"""A server's blocks of the dense parameters, and the torch optimizer that updates them.

Torch is imported only if there are blocks: a server with tables alone starts in a third of the time without it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, UsageError, first_line
from echelon.parameter_server.protocol.job_spec import DenseBlock, DenseRule, JobSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Floats = NDArray[np.float32]

#: Optimizers of torch, and Echelon's own.
TORCHS, OURS = ("SGD", "Adagrad", "Adam", "AdamW"), ("FTRL", "LARS", "LAMB")
KINDS = (*TORCHS, *OURS)
#: Optimizers that use norms of whole parameters; the others are element-wise.
LAYERWISE = ("LARS", "LAMB")
#: Additional setting of a parameter group: the parameters without weight decay and trust ratio.
EXCLUDE = "exclude"
#: Most dense entries of one job; a server refuses to allocate more.
MAX_ENTRIES = 2**36


class BlockRange(NamedTuple):
    """A block's location: entries ``start`` to ``stop`` of the flat values, from ``at`` on in parameter ``home``."""

    block: DenseBlock
    start: int
    stop: int
    home: int
    at: int


class DenseShard:
    """The values of this server's blocks in JobSpec order; callers see one flat float32 vector.

    Element-wise optimizers see all blocks of a group as one vector: one call gives the same result as one call per
    block. LARS and LAMB see every block (a whole parameter) separately.
    """

    def __init__(self, job: JobSpec, server: int) -> None:
        self.blocks = [block for block in job.blocks if block.server == server]
        self.size = sum(block.length for block in self.blocks)
        self.steps = 0
        self._mutex = threading.Lock()
        self._values: Floats | None = None
        self._settings: list[dict[str, Any]] = []  # of the last push; most pushes repeat them
        self._stretches = _stretches(self.blocks, job.dense)
        self._runs = _runs(self._stretches)
        self._parameters = _parameters(self._stretches, job.device) if self.blocks else []
        self._optimizer = _optimizer(job.dense, self._stretches, self._parameters) if self.size else None

    # ---- reading ----

    def values(self) -> Floats:
        """Return all values; the array is not modified later."""
        with self._mutex:
            if self._values is None:
                self._values = self._gathered([parameter.data for parameter in self._parameters])
                self._values.flags.writeable = False
            return self._values

    def name_at(self, entry: int) -> str:
        """Return the name of the parameter that an entry of the flat values belongs to."""
        return next((s.block.parameter for s in self._stretches if s.start <= entry < s.stop), "?")

    # ---- writing ----

    def begin(self, values: Floats) -> None:
        """Set the initial values of all blocks."""
        with self._mutex:
            self._scatter(values, [parameter.data for parameter in self._parameters])
            self._values = None

    def step(self, gradient: Floats, groups: Sequence[dict[str, Any]]) -> None:
        """Run one step of the optimizer with the given settings of its parameter groups."""
        if self._optimizer is None:
            return
        import torch

        with self._mutex:
            self._adjust(groups)
            for parameter in self._parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            self._scatter(gradient, [parameter.grad for parameter in self._parameters if parameter.grad is not None])
            self._optimizer.step()
            self._values = None
            self.steps += 1

    def add(self, change: Floats) -> None:
        """Add the change that a geo worker sent to the values."""
        import torch

        with self._mutex, torch.no_grad():
            changes = [torch.empty_like(parameter) for parameter in self._parameters]
            self._scatter(change, changes)
            for parameter, own in zip(self._parameters, changes, strict=True):
                parameter.add_(own)
            self._values = None
            self.steps += 1

    def _adjust(self, groups: Sequence[dict[str, Any]]) -> None:
        assert self._optimizer is not None
        if groups == self._settings:
            return
        self._settings = list(groups)
        for group, settings in zip(self._optimizer.param_groups, groups, strict=False):
            group.update(_settings(settings))

    # ---- persistence ----

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all state: "<block>/values" and "<block>/<state name>" per block number of this server, and "groups".

        States with an entry per value are cut like the values; scalar states have one entry.
        """
        with self._mutex:
            kept: dict[str, NDArray[Any]] = {"groups": _as_bytes([self._group_settings(), self.steps])}
            for number, stretch in enumerate(self._stretches):
                home = self._parameters[stretch.home]
                kept[f"{number}/values"] = _cut(home.data, stretch)
                state = self._optimizer.state.get(home, {}) if self._optimizer else {}
                for name, value in state.items():
                    if value is not None:
                        kept[f"{number}/{name}"] = _cut(value, stretch) if _per_entry(value) else _single(value)
        return kept

    def from_arrays(self, kept: dict[str, NDArray[Any]]) -> None:
        """Load what ``to_arrays`` returned into a DenseShard of the same job and server."""
        with self._mutex:
            settings, self.steps = json.loads(kept["groups"].tobytes())
            if self._optimizer is not None:
                self._optimizer.state.clear()  # also removes states that the loaded arrays do not have
                self._adjust(settings)
            for number, stretch in enumerate(self._stretches):
                own = {key.partition("/")[2]: a for key, a in kept.items() if key.partition("/")[0] == str(number)}
                _paste(self._parameters[stretch.home].data, own.pop("values"), stretch)
                for name, array in own.items():
                    self._restore_state(stretch, name, array)
            self._values = None

    def _restore_state(self, stretch: BlockRange, name: str, array: NDArray[Any]) -> None:
        import torch

        assert self._optimizer is not None
        home = self._parameters[stretch.home]
        state = self._optimizer.state[home]
        if name == "step":
            state[name] = int(array[0]) if array.dtype == np.int64 else torch.tensor(float(array[0]))
            return
        if name not in state or state[name] is None:
            state[name] = torch.zeros_like(home)
        _paste(state[name], array, stretch)

    def _group_settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups if self._optimizer else []
        return [{k: v for k, v in group.items() if _plain(v)} for group in groups]

    # ---- copies between the flat vector and the parameters ----

    def _scatter(self, flat: Floats, targets: Sequence[Tensor]) -> None:
        for start, stop, home, at in self._runs:
            part = targets[home].detach().view(-1)[at : at + stop - start]
            if part.device.type == "cpu":
                np.copyto(part.numpy(), flat[start:stop])
            else:
                part.copy_(_tensor(flat[start:stop].copy()))

    def _gathered(self, sources: Sequence[Tensor]) -> Floats:
        flat = np.empty(self.size, np.float32)
        for start, stop, home, at in self._runs:
            flat[start:stop] = sources[home].detach().view(-1)[at : at + stop - start].cpu().numpy()
        return flat


def check(job: JobSpec) -> None:
    """Raise ``UsageError`` for blocks and settings from which no optimizer can be built."""
    entries = 0
    for block in job.blocks:
        entries += block.length
        if min(block.offset, block.length, block.group, *block.shape, 0) < 0 or math.prod(block.shape) != block.length:
            raise UsageError(f"a block of '{block.parameter}' has {block.length} entries but the shape {block.shape}")
        if not 0 <= block.server < job.servers:
            raise UsageError(
                f"a block of '{block.parameter}' is on server {block.server}; there are {job.servers} servers"
            )
        if block.group >= max(1, len(job.dense.groups)):
            raise UsageError(f"a block of '{block.parameter}' is in group {block.group} of {len(job.dense.groups)}")
    if entries > MAX_ENTRIES:
        raise UsageError(f"{entries} dense entries are more than a job may have ({MAX_ENTRIES})")
    try:
        if job.blocks or job.device != "cpu":
            _try_out(job)
    except EchelonError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
        raise UsageError(f"no {job.dense.kind} on {job.device}: {first_line(error)}") from None


def _try_out(job: JobSpec) -> None:
    import torch
    from torch import nn

    torch.empty(0, device=job.device)
    if job.blocks:
        samples = [nn.Parameter(torch.zeros(1)) for _ in range(max(1, len(job.dense.groups)))]
        groups = [{"params": [p], **_of(job.dense, i)} for i, p in enumerate(samples)]
        _kind(job.dense.kind)(groups, **_rate(job))


def _kind(name: str) -> Any:
    """Return the optimizer class with this name."""
    import torch

    from echelon import optim

    if name not in KINDS:
        raise KeyError(name)
    return getattr(optim if name in OURS else torch.optim, name)


def check_settings(groups: Any, count: int) -> None:
    """Raise ``UsageError`` if the group settings of a push are not plain finite values, or are for too many groups."""
    if not isinstance(groups, list) or len(groups) > max(1, count):
        raise UsageError(f"a push has settings for {_length(groups)} parameter groups; the job has {count}")
    for group in groups:
        if not isinstance(group, dict) or not all(_plain(value) for value in group.values()):
            raise UsageError("a push has settings of a parameter group that are not plain finite values")


def _length(value: Any) -> Any:
    return len(value) if isinstance(value, list) else repr(value)[:40]


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 16 and all(isinstance(v, int | float | str) and _plain(v) for v in value)
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as torch takes them: JSON has no tuples, and ``EXCLUDE`` is used only when a job opens."""
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    return {key: value for key, value in plain.items() if key not in ("params", EXCLUDE)}


def _of(rule: DenseRule, group: int) -> dict[str, Any]:
    return _settings(rule.groups[group]) if rule.groups else {}


def _rate(job: JobSpec | DenseRule) -> dict[str, Any]:
    """Return the settings that torch needs as arguments even if every group has its own."""
    rule = job.dense if isinstance(job, JobSpec) else job
    first = _of(rule, 0)
    known = {"lr": first.get("lr", 0.01)}
    if rule.kind == "Adagrad" and "initial_accumulator_value" in first:
        known["initial_accumulator_value"] = first["initial_accumulator_value"]
    return known


def _stretches(blocks: list[DenseBlock], rule: DenseRule) -> list[BlockRange]:
    groups = sorted({block.group for block in blocks})
    filled = dict.fromkeys(groups, 0)
    found, start = [], 0
    for number, block in enumerate(blocks):
        apart = rule.kind in LAYERWISE
        home, at = (number, 0) if apart else (groups.index(block.group), filled[block.group])
        found.append(BlockRange(block, start, start + block.length, home, at))
        filled[block.group] += block.length
        start += block.length
    return found


def _runs(stretches: list[BlockRange]) -> list[tuple[int, int, int, int]]:
    """Merge blocks that are adjacent both in the flat values and in their parameter into (start, stop, home, at)."""
    runs: list[tuple[int, int, int, int]] = []
    for stretch in stretches:
        if runs:
            start, stop, home, at = runs[-1]
            if (stop, home, at + stop - start) == (stretch.start, stretch.home, stretch.at):
                runs[-1] = (start, stretch.stop, home, at)
                continue
        runs.append((stretch.start, stretch.stop, stretch.home, stretch.at))
    return runs


def _parameters(stretches: list[BlockRange], device: str) -> list[nn.Parameter]:
    import torch
    from torch import nn

    shapes: dict[int, tuple[int, ...]] = {}
    together: dict[int, int] = {}
    for stretch in stretches:
        together[stretch.home] = max(together.get(stretch.home, 0), stretch.at + stretch.block.length)
        shapes[stretch.home] = stretch.block.shape if stretch.home not in shapes else ()
    alone = {home: math.prod(shape) == together[home] for home, shape in shapes.items()}
    made = [torch.zeros(shapes[home] if alone[home] else (together[home],), device=device) for home in sorted(together)]
    return [nn.Parameter(values) for values in made]


def _optimizer(rule: DenseRule, stretches: list[BlockRange], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with one parameter group per group of the job, in order, even for groups without blocks."""
    of_group: dict[int, dict[int, nn.Parameter]] = {}
    excluded: dict[int, nn.Parameter] = {}
    for stretch in stretches:
        group = stretch.block.group
        of_group.setdefault(group, {})[stretch.home] = parameters[stretch.home]
        if rule.groups and stretch.block.parameter in (rule.groups[group].get(EXCLUDE) or ()):
            excluded[stretch.home] = parameters[stretch.home]
    groups = [
        {"params": list(of_group.get(group, {}).values()), **_of(rule, group)}
        for group in range(max(1, len(rule.groups)))
    ]
    layerwise = {"exclude": list(excluded.values())} if rule.kind in LAYERWISE else {}
    made: torch.optim.Optimizer = _kind(rule.kind)(groups, **_rate(rule), **layerwise)
    return made


def _cut(tensor: Tensor, stretch: BlockRange) -> Floats:
    """Return a copy of a block's entries of its parameter, or of a state of the same shape."""
    part = tensor.detach().reshape(-1)[stretch.at : stretch.at + stretch.block.length]
    found: Floats = part.float().cpu().numpy().copy()
    return found


def _paste(tensor: Tensor, values: Floats, stretch: BlockRange) -> None:
    source = np.ascontiguousarray(values, np.float32)
    given = _tensor(source if source.flags.writeable else source.copy())
    tensor.detach().view(-1)[stretch.at : stretch.at + stretch.block.length].copy_(given)


def _tensor(values: Floats) -> Tensor:
    import torch

    return torch.from_numpy(values)


def _per_entry(value: Any) -> bool:
    return hasattr(value, "dim") and value.dim() > 0


def _single(value: Any) -> NDArray[Any]:
    if hasattr(value, "item"):  # a tensor
        return np.array([value.item()], np.float32)
    return np.array([value], np.int64)


def _as_bytes(plain: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)
