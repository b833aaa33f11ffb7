"""Adam and AdamW with low-memory state, in place of the user's optimizer, whose parameter groups it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from echelon.base.errors import CheckpointError, UsageError
from echelon.optim.from_torch import require_plain
from echelon.optim.fused import has_triton
from echelon.optim.shared_groups import SharingOptimizer, share_groups
from echelon.parallel.low_memory import formats, state_placement
from echelon.parallel.low_memory.formats import BLOCK, AdamStepScalars, LowMemoryState, seed_of
from echelon.parallel.low_memory.host_ring import PIECE, HostStateRing, StateChunk
from echelon.strategy import LowMemory

FIELDS = ("remainder", "first", "second", "first_scale", "second_scale")


class StateCopies(Protocol):
    """Copies of the optimizer state that are being made, such as in-memory snapshots."""

    def hold(self) -> None:
        """Wait until the copies no longer read the state."""


@dataclass(eq=False)
class LowMemoryParam:
    """One parameter, its parameter group and its state.

    kept: the parameter's entry in the optimizer's state, which is also saved in a checkpoint
    """

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    pieces: list[StateChunk]
    kept: dict[str, Any]

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the weight or its gradient as a flat tensor, in the memory order of the weight."""
        weight = self.parameter
        if tensor.stride() != weight.stride():
            tensor = torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class LowMemoryAdam(SharingOptimizer):
    """Adam with bf16 weights, remainders and 8-bit moments; ``apply`` updates one parameter.

    The constructor converts the weights to bf16 one after the other, each on its device.
    """

    reads_later = True  #: loaded state arrives as functions that read it, because two copies of it would not fit

    def __init__(self, source: torch.optim.Optimizer, settings: LowMemory, named: Mapping[str, nn.Parameter]) -> None:
        require_plain("low_memory", source, (Adam, AdamW))
        super().__init__([{**group} for group in source.param_groups], dict(source.defaults))
        share_groups(self, source)
        self._factor: Callable[[], float] = lambda: 1.0
        self._copies: Callable[[], StateCopies | None] = lambda: None
        names = {id(parameter): name for name, parameter in named.items()}
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        exact = [_as_bf16(names[id(parameter)], parameter) for parameter, _ in members]
        device = members[0][0].device if members else torch.device("cpu")
        self.places = state_placement.choose([parameter.numel() for parameter, _ in members], settings, device)
        states = self._make_states([parameter for parameter, _ in members])
        self.entries: list[LowMemoryParam] = []
        count = 0
        for (parameter, group), state, away, remainder in zip(members, states, self.places.on_host, exact, strict=True):
            if remainder is not None:
                state.remainder.copy_(remainder)
            kept = self._state[parameter] = {"step": 0, **dict(zip(FIELDS, state.tensors(), strict=True))}
            pieces = _cut(state, parameter.numel(), count, away)
            count += len(pieces)
            self.entries.append(LowMemoryParam(names[id(parameter)], parameter, group, pieces, kept))
        longest = max((piece.end - piece.begin for piece in self._pieces() if piece.on_host), default=0)
        self._ring = HostStateRing(device, longest) if longest else None
        self._update = _kernel() if device.type == "cuda" and has_triton() else formats.update

    def connect(self, factor: Callable[[], float], copies: Callable[[], StateCopies | None]) -> None:
        """Use an engine's state.

        factor: returns the factor of the learning rates
        copies: returns copies that may still read the optimizer's state
        """
        self._factor, self._copies = factor, copies

    def _pieces(self) -> Iterable[StateChunk]:
        return (piece for entry in self.entries for piece in entry.pieces)

    def _make_states(self, weights: list[nn.Parameter]) -> list[LowMemoryState]:
        away = [weight for weight, there in zip(weights, self.places.on_host, strict=True) if there]
        far = iter(state_placement.on_host(away, self) if away else ())
        paired = zip(weights, self.places.on_host, strict=True)
        return [next(far) if there else state_placement.on_device(weight) for weight, there in paired]

    @property
    def state(self) -> Any:
        """Optimizer state by parameter; access waits until all of it is back in host memory."""
        ring = self.__dict__.get("_ring")
        if ring is not None:
            ring.wait()
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value

    @property
    def fills_host(self) -> bool:
        """True if part of the state is in host memory, so that no copy of the state must be made there."""
        return self.places.host_bytes > 0

    def begin(self, entries: Iterable[LowMemoryParam]) -> None:
        """Begin a step whose gradients are expected in this order, and prefetch their state."""
        if (copies := self._copies()) is not None:
            copies.hold()
        if self._ring is not None:
            self._ring.expect(piece for entry in entries for piece in entry.pieces if piece.on_host)

    @torch.no_grad()
    def apply(self, entry: LowMemoryParam, grad: Tensor) -> None:
        """Update one parameter on the current stream; tensors that backward saved of it become invalid."""
        entry.kept["step"] += 1
        rule, weight, flat = self._rule(entry), entry.flat(entry.parameter.data), entry.flat(grad)
        for piece in entry.pieces:
            seed = seed_of(piece.number, entry.kept["step"])
            here = slice(piece.begin, piece.end)
            if not piece.on_host or self._ring is None:
                self._update(weight[here], flat[here], piece.state, rule, seed)
                continue
            slot = self._ring.take(piece)
            self._update(weight[here], flat[here], slot.holding(piece), rule, seed)
            self._ring.give_back(piece, slot)
        torch.autograd.graph.increment_version(entry.parameter)  # lets autograd detect a use of the old weight

    @torch.no_grad()
    def exact_weight(self, entry: LowMemoryParam) -> Tensor:
        """Return the fp32 weight of an entry whose remainder is on the device."""
        return formats.join_fp32(entry.parameter.data, entry.kept["remainder"])

    def _rule(self, entry: LowMemoryParam) -> AdamStepScalars:
        group, step = entry.group, entry.kept["step"]
        rate, decay = float(group["lr"]) * self._factor(), group["weight_decay"]
        beta1, beta2 = map(float, group["betas"])
        decoupled = group.get("decoupled_weight_decay", False)
        return AdamStepScalars(
            betas=(beta1, beta2),
            rests=(1 - beta1, 1 - beta2),
            eps=group["eps"],
            shrink=1 - rate * decay if decoupled else 1.0,
            decay=0.0 if decoupled else decay,
            stride=rate / (1 - beta1**step),
            inverse=(1 - beta2**step) ** -0.5,
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: ``apply`` has updated each parameter when its gradient was complete."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state into the existing tensors: torch's own method would cast it to the dtype of the weights.

        Raises CheckpointError if the saved state is not low_memory.
        """
        if self._ring is not None:
            self._ring.forget()
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        kept = self.state
        for index, found in state_dict["state"].items():
            local = kept[order[index]]
            if set(found) != set(local):
                raise CheckpointError(
                    "the checkpoint's optimizer state is not low_memory; go on with the strategy it was saved with"
                )
            for field in FIELDS:
                stored = found[field]
                local[field].copy_(stored() if callable(stored) else stored)
            local["step"] = found["step"]
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})


def connect_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer],
    factor: Callable[[], float],
    copies: Callable[[], StateCopies | None],
) -> list[str]:
    """Connect low-memory optimizers to an engine's rate factor and state copies; return a log line for each."""
    low_memory = {key: optimizer for key, optimizer in optimizers.items() if isinstance(optimizer, LowMemoryAdam)}
    for optimizer in low_memory.values():
        optimizer.connect(factor, copies)
    return [
        f"low_memory: {o.places}{f' (optimizer {key})' if len(low_memory) > 1 else ''}" for key, o in low_memory.items()
    ]


def _kernel() -> Callable[..., None]:
    from echelon.parallel.low_memory import adam_kernel

    return adam_kernel.update


@torch.no_grad()
def _as_bf16(name: str, parameter: nn.Parameter) -> Tensor | None:
    """Convert the parameter to bf16 and return the remainder; None if it was bf16 already."""
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(
            f"low_memory: '{name}' is {parameter.dtype}; build the model in torch.float32 or torch.bfloat16"
        )
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        parameter.data = parameter.data.contiguous()
    parameter.grad = None
    if parameter.dtype == torch.bfloat16:
        return None
    parameter.data, remainder = formats.split_fp32(parameter.data)
    return remainder


def _cut(state: LowMemoryState, entries: int, first: int, on_host: bool) -> list[StateChunk]:
    remainder, first_codes, second_codes = (kept.as_strided((entries,), (1,)) for kept in state.tensors()[:3])
    pieces = []
    for number, begin in enumerate(range(0, entries, PIECE), start=first):
        end = min(begin + PIECE, entries)
        blocks = slice(begin // BLOCK, -(-end // BLOCK))
        part = LowMemoryState(
            remainder=remainder[begin:end],
            first=first_codes[begin:end],
            second=second_codes[begin:end],
            first_scale=state.first_scale[blocks],
            second_scale=state.second_scale[blocks],
        )
        pieces.append(StateChunk(number, begin, end, part, on_host))
    return pieces
