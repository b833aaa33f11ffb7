"""Replace the tensors that the stages of a rank do not need by fake tensors: parameters, buffers and activations.

A fake tensor has a shape and dtype but no memory. The model keeps its structure and names, so the user's forward runs
on every rank; its results from fake tensors are fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.parallel.pipeline.inter_stage_cache import MOST_KNOWN, is_changed, lend
from echelon.plan.fake_forward import as_module_output, is_placeholder, placeholder
from echelon.plan.stage_trace import StageTrace


class PlaceholderPool:
    """Fake tensors of one stage and micro-batch, reused in every step.

    Creating one takes torch 0.4 ms, which was half of the time of a small model's interleaved step.
    """

    def __init__(self, known: dict[Hashable, Tensor], borrower: tuple[int, int]) -> None:
        self._known, self.borrower = known, borrower
        self._out: list[Hashable] = []

    def given(self, key: str, like: Tensor) -> Tensor:
        """Return a fake tensor for a part of the batch."""
        return self._lend(key, like, placeholder)

    def made(self, key: str, like: Tensor) -> Tensor:
        """Return a fake tensor for an output of a unit."""
        return self._lend(key, like, fresh_placeholder)

    def all_made(self, prefix: str, leaves: Sequence[Any]) -> list[Any]:
        """Return fake tensors for all tensors among the outputs of a unit."""
        return [
            self.made(f"{prefix}/{at}", leaf) if isinstance(leaf, Tensor) else leaf for at, leaf in enumerate(leaves)
        ]

    def _lend(self, key: str, like: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if like.layout != torch.strided:
                return make(like)
            look = (self.borrower, key, torch.is_grad_enabled(), like.shape, like.stride(), like.dtype, like.device)
            self._out.append(look)
            result = self._known.get(look)
            if result is None:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                result = self._known[look] = lend(make(like))
            return result

    def drop_changed(self) -> None:
        """Drop, at the end of a pass, fake tensors that user code changed in place.

        Such a tensor would keep alive the tensors that were written into it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for look in self._out:
                fake = self._known.get(look)
                if fake is not None and is_changed(fake):
                    del self._known[look]


def fresh_placeholder(leaf: Tensor) -> Tensor:
    """Return a fake tensor like ``leaf``, with a grad_fn as the output of a unit has."""
    return as_module_output(placeholder(leaf))


def keep_only(model: nn.Module, recording: StageTrace, stages: Sequence[int]) -> None:
    """Replace parameters and buffers that none of ``stages`` needs, and free their memory. Tied names stay tied.

    This must be called before modules are split, synchronized or recomputed, and these must be applied only to modules
    that are kept: a module of another stage still runs to find the shape of its output, without collectives.
    """
    local = {name for name, holders in recording.holders.items() if not set(holders).isdisjoint(stages)}
    kept = {id(value) for name, value in _first_names(model) if name in local}
    made: dict[int, Tensor] = {}
    let_go: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in kept and not is_placeholder(parameter):
                let_go[id(parameter)] = parameter
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(placeholder(parameter), requires_grad=False)
                setattr(module, name, made[id(parameter)])  # not in _parameters: recurrent modules keep their own list
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) not in kept and not is_placeholder(buffer):
                module._buffers[name] = made.setdefault(id(buffer), placeholder(buffer))
    for parameter in let_go.values():  # an optimizer may still refer to it
        parameter.data, parameter.grad = parameter.data.new_empty(0), None


def holds(module: nn.Module) -> bool:
    """Return True if none of the module's parameters and buffers is a fake tensor, so that this rank runs it."""
    return not any(is_placeholder(value) for _, value in _first_names(module))


def _first_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
