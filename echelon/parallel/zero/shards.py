"""Shards one model's optimizer state, gradients and parameters over its replicas (ZeRO).

Level 1 shards the optimizer state, level 2 the gradients too, level 3 the parameters too. On every level an optimizer
holds shards, which are this rank's rows of the parameters, in place of the parameters.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Layout
from echelon.parallel.zero.reduce_scatter import ShardBucket, ShardReducer
from echelon.parallel.zero.row_partition import RowPartition, cut_all
from echelon.parallel.zero.shard_unit import Offload, ShardUnit
from echelon.parallel.zero.sharded_modules import visit_modules
from echelon.parallel.zero.wrap_policy import SMALL, find_units
from echelon.parallel.zero.zero3 import ParamGatherer
from echelon.parallel.zero.zero12 import ReplicatedParams
from echelon.parallel.zero.zero_collectives import ShardCollectives


class Shards:
    """This rank's shards of a model, and the collectives between shards and whole parameters.

    parameters: parameters of this rank, by name (a stage has fewer than the model)
    layouts:    position of each parameter in the unsplit parameter, by name
    buckets:    for each optimizer, buckets of names of trained parameters of one dtype, in backward order
    group:      ranks that hold replicas of these parameters; ``None`` if there is only one
    level:      ZeRO level, 1 to 3
    offload:    "optimizer", "parameters" or None (default): what is kept in host memory
    device:     device of the parameters; default: that of the first one
    gathering:  second process group of the same ranks, so that all-gathers may overtake reduce-scatters (NCCL)
    across:     ranks of other groups that hold the same shards (HSDP); default: there is one group
    everyone:   ranks of all groups; default: ``group``
    small:      size in numbers below which a unit is merged into the whole model's unit
    shared:     names of parameters that other stages have too
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        optimizers: Mapping[str, torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
        buckets: Mapping[str, Sequence[Sequence[str]]],
        level: Literal[1, 2, 3],
        offload: Offload = None,
        device: torch.device | None = None,
        *,
        gathering: dist.ProcessGroup | None = None,
        across: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
        small: int = SMALL,
        shared: Collection[str] = (),
    ) -> None:
        _check(model, parameters, optimizers, level, offload)
        device = device or next(iter(parameters.values())).device
        self.level, self._parameters, self._optimizers = level, parameters, optimizers
        self.exchange = ShardCollectives(group, device, gathering, across, everyone)
        owned = {id(p) for o in optimizers.values() for options in o.param_groups for p in options["params"]}
        chosen = {name: tuple(p.shape) for name, p in parameters.items() if level == 3 or id(p) in owned}
        self._cuts = cut_all(chosen, self.exchange.ranks, shared)
        self.layouts = {name: cut.layout(layouts[name], self.exchange.me) for name, cut in self._cuts.items()}
        #: True if this rank counts a shard in sums over ranks (a norm); a parameter that cannot be cut is on all ranks
        self.counts = {name: cut.dim is not None or self.exchange.me == 0 for name, cut in self._cuts.items()}
        self._units: dict[str, ShardUnit] = {}
        self._visits: ParamGatherer | None = None
        self._kept: ReplicatedParams | None = None
        #: shards that the optimizers hold in place of the parameters
        self.shards: dict[str, nn.Parameter] = {}
        if level == 3:
            self._visits = self._part_with_parameters(model, offload, device, small)
        else:
            self._kept = ReplicatedParams(parameters, self._cuts, buckets, self.exchange, offload is not None)
            self.shards = self._kept.shards
        self._trained = {key: [parameters[name] for names in lists for name in names] for key, lists in buckets.items()}
        self._hand_over()
        self._reducers = self._make_reducers(buckets)
        if self._visits is not None:
            visit_modules(model, self._units, self._visits)
            for unit in self._units.values():
                unit.leave()

    def _part_with_parameters(
        self, model: nn.Module, offload: Offload, device: torch.device, small: int
    ) -> ParamGatherer:
        for number, (name, inside) in enumerate(find_units(model, self._parameters, small).items()):
            held = {name: self._parameters[name] for name in inside}
            self._units[name] = ShardUnit(name, number, held, self._cuts, self.exchange, offload)
            self.shards |= self._units[name].shards
        return ParamGatherer(list(self._units.values()), self.exchange, device, self._relieve)

    def _hand_over(self) -> None:
        names = {parameter: name for name, parameter in self._parameters.items()}
        for optimizer in self._optimizers.values():
            hand_over(optimizer, names, self.shards, self._cuts, self.exchange.me)
        for parameter in self._parameters.values():
            parameter.grad = None  # no optimizer clears it from now on

    def _make_reducers(self, buckets: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, ShardReducer]:
        numbers = itertools.count()

        def bucket(names: Sequence[str]) -> ShardBucket:
            return ShardBucket(names, self._parameters, self.shards, self._cuts, self.exchange, next(numbers))

        return {
            key: ShardReducer([bucket(names) for names in buckets[key]], unhurried=self.level == 3) for key in buckets
        }

    def reducer(self, key: str) -> ShardReducer:
        """Return the gradient reducer of one optimizer.

        Levels 2 and 3 arm it in every pass, level 1 only in the last merged pass.
        """
        return self._reducers[key]

    def after_step(self, optimizers: Iterable[str]) -> None:
        """Update whole parameters from the shards that these optimizers have changed."""
        chosen = list(optimizers)
        if self._kept is not None:
            self._kept.hand_round(chosen)
        self._renew([parameter for key in chosen for parameter in self._trained[key]])

    def refresh(self) -> None:
        """Update everything else after a checkpoint was loaded into the shards, including frozen ones."""
        if self._kept is not None:
            self._kept.hand_round_all()
        self._renew(list(self._parameters.values()))

    def _renew(self, changed: Sequence[nn.Parameter]) -> None:
        for unit in self._units.values():
            unit.stepped()
        # Activation recomputation checks the version to detect a weight that changed between forward and backward.
        torch.autograd.graph.increment_version(changed)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Unshard all parameters within the context, to read or export them; equal changes on all ranks are kept."""
        if self._visits is None:
            yield
            return
        for unit in self._units.values():
            self._visits.hold(unit)
        try:
            yield
            for unit in self._units.values():
                unit.write_back()
        finally:
            for unit in self._units.values():
                self._visits.release(unit)

    def close(self) -> None:
        """Unshard all parameters permanently; then the model runs without sharding. All ranks call this."""
        if self._visits is not None:
            for unit in self._units.values():
                self._visits.hold(unit)
            self._visits.active = False

    def memory(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients and optimizer state, and those of them on the host.

        ``whole`` is the peak size of unsharded parameters at level 3.
        """
        everything = [*self._parameters.values(), *self.shards.values()]
        kinds: dict[str, list[Tensor]] = {
            "parameters": list(everything),
            "gradients": [tensor.grad for tensor in everything if tensor.grad is not None],
            "optimizer": [value for o in self._optimizers.values() for value in _state_tensors(o)],
        }
        held = {kind: _bytes(tensors) for kind, tensors in kinds.items()}
        hosted = [t for tensors in kinds.values() for t in tensors if t.device.type == "cpu"]
        return {**held, "host": _bytes(hosted), "whole": self._visits.most if self._visits else 0}

    def _relieve(self) -> None:
        if self._visits is not None and self._visits.passes.kind == "backward":
            for reducer in self._reducers.values():
                reducer.relieve()


def _check(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, torch.optim.Optimizer],
    level: int,
    offload: str | None,
) -> None:
    if level not in (1, 2, 3):
        raise UsageError(f"sharding has levels 1, 2 and 3, got {level!r}")
    if offload == "parameters" and level != 3:
        raise UsageError(f"offload='parameters' needs level 3, got level {level}; use level 3 or offload='optimizer'")
    refuse_whole(optimizers)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in names:
            raise UsageError(
                f"sharding: '{names[id(module.weight)]}' has sparse gradients, and shards are dense; use sparse=False, "
                "or train without sharding"
            )


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# The step of these optimizers needs whole parameters: their rows and columns, or all parameters together. (LARS and
# LAMB need only a parameter's norm, which can be summed over ranks.)
WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))


def refuse_whole(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise UsageError for an optimizer that cannot step each shard of a parameter by itself."""
    for key, optimizer in optimizers.items():
        kind = type(optimizer).__name__
        if isinstance(optimizer, WHOLE):
            raise UsageError(
                f"optimizer '{key}' is {kind}, whose step needs whole parameters, and sharding gives it parts; use "
                "Adam, AdamW or SGD, or train without sharding"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError(f"optimizer '{key}' is {kind}, and shards are dense; use Adam with sparse=False")


def hand_over(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    shards: Mapping[str, nn.Parameter],
    cuts: Mapping[str, RowPartition],
    rank: int,
) -> None:
    """Replace the parameters of ``optimizer`` by their shards, and shard its state."""
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = group["params"]
        for index, parameter in enumerate(params):
            shard = shards[names[parameter]]
            params[index] = shard
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[shard] = _cut_state(state, parameter, shard, cuts[names[parameter]], rank)


def _cut_state(
    state: dict[str, Any], parameter: nn.Parameter, shard: nn.Parameter, cut: RowPartition, rank: int
) -> dict[str, Any]:
    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == parameter.shape:
            value = cut.of(value, rank).clone()
        return value.to(shard.device) if value.device == parameter.device else value

    return {key: part(value) for key, value in state.items()}
