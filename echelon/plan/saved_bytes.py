"""Bytes that a forward pass saves for backward, counted during the pass or predicted with fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from echelon.base.errors import UsageError, first_line
from echelon.plan.fake_tensor_rules import make_mode
from echelon.plan.segments import Segments


class SavedBytes:
    """Counts the bytes that autograd saves for backward within this context, each storage once.

    persistent: tensors that are not counted
    keep:       returns the tensor to save; default: the tensor itself, so that backward can run; ``forget``: nothing
    """

    def __init__(self, persistent: Iterable[Tensor], keep: Callable[[Tensor], Tensor | None] = Tensor.detach) -> None:
        # Weak references do not keep the memory alive, and no later storage gets the identity of a freed one.
        self._persistent = {_identity(tensor) for tensor in persistent}
        self._found: dict[StorageWeakRef, int] = {}
        self._keep = keep
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    @property
    def total(self) -> int:
        return sum(self._found.values())

    def _pack(self, tensor: Tensor) -> Tensor | None:
        identity = _identity(tensor)
        if identity not in self._persistent:
            self._found[identity] = tensor.untyped_storage().nbytes()
        return self._keep(tensor)


def forget(_: Tensor) -> None:
    """Save nothing for backward, for a pass that is only measured."""


def activation_bytes(
    model: nn.Module, sample: tuple[Any, ...] | dict[str, Any], segments: Segments = (), chains: tuple[str, ...] = ()
) -> int:
    """Return the bytes that one training forward of ``model`` on ``sample`` saves for backward.

    Nothing is computed or allocated, and the model is left unchanged. Under ``torch.autocast`` the result is for
    autocast. Raises ``UsageError`` if the model cannot be copied.

    segments: modules that are recomputed together, one tuple per segment
    chains:   sequences that are cut into recomputed segments
    """
    from echelon.parallel.activation_checkpoint import apply_recompute  # parallel/ builds on plan/, so not at import

    fake = make_mode()
    shadow = _shadow(model, fake).train()
    batch = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, sample)
    apply_recompute(shadow, segments, chains, offload=False, group=None)
    with fake, torch.enable_grad(), SavedBytes([*shadow.parameters(), *shadow.buffers()]) as saved:
        output = shadow(**batch) if isinstance(batch, dict) else shadow(*batch)
    del output
    return saved.total


def _shadow(model: nn.Module, fake: Any) -> nn.Module:
    """Return a copy of the model with fake tensors."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    try:
        with FakeCopyMode(fake):
            return copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"the model cannot be copied ({first_line(error)}), so its activations cannot be predicted; train one "
            "step and look at torch.cuda.max_memory_allocated()"
        ) from None


def _identity(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
