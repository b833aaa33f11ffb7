"""How many bytes a forward pass keeps for backward: counted as it runs, or foretold without running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from echelon.base.errors import UsageError
from echelon.plan.fake_tensor_rules import make_mode
from echelon.plan.segments import Segments


class SavedBytes:
    """Within this context, counts what autograd keeps for backward: each storage once, ``persistent`` tensors never.

    keep: what is kept in place of a tensor. By default the tensor, so that backward can run; ``forget`` keeps nothing.
    """

    def __init__(self, persistent: Iterable[Tensor], keep: Callable[[Tensor], Tensor | None] = Tensor.detach) -> None:
        # Weak references: they free the memory, and yet no other storage gets the identity of one that is gone.
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
    """For a pass that is only measured: its graph keeps nothing."""


def activation_bytes(
    model: nn.Module, sample: tuple[Any, ...] | dict[str, Any], segments: Segments = (), chains: tuple[str, ...] = ()
) -> int:
    """The bytes one training forward of ``model`` on ``sample`` keeps for backward, recomputing what is given.

    Nothing is computed or allocated, and the model is left as it is. Under ``torch.autocast`` the answer is for that.
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
    """A copy of the model whose tensors have shapes but no contents."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    try:
        with FakeCopyMode(fake):
            return copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"the model cannot be copied ({str(error).splitlines()[0]}), so its activations cannot be foretold; "
            "train it a step and look at torch.cuda.max_memory_allocated()"
        ) from None


def _identity(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
