"""What each module keeps for backward, found by a forward pass on placeholders: every storage once, weights never.

What is kept belongs to the innermost module that runs when autograd keeps it; to the loss where none does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.plan.foretell import placeholder_mode, random_numbers_kept
from echelon.planner.model.gpu import AsOnGpu
from echelon.planner.model.profile import Profile
from echelon.planner.model.rehearse import placed
from echelon.planner.model.shadow import Shadow

#: Where no module runs.
LOSS = "(loss)"
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def kept_by_module(profile: Profile, samples: int, amp: str | None, recomputed: Collection[str] = ()) -> dict[str, int]:
    """Bytes by the module's name. ``recomputed``: modules that keep only what they are given."""
    shadow = Shadow(profile.model, [])
    seen = _Keeping(shadow.model, recomputed)
    batch = placed(profile.placeholders(samples))
    with contextlib.ExitStack() as within:
        for context in (placeholder_mode(), random_numbers_kept(), torch.enable_grad(), seen.watching()):
            within.enter_context(context)
        if profile.device == "cuda":
            within.enter_context(AsOnGpu())
        if amp is not None:
            within.enter_context(torch.autocast("cpu", dtype=_AMP[amp]))
        loss = profile.step(shadow.model, batch)
        found = seen.by_module()
    del loss  # so far it held what was kept
    torch.clear_autocast_cache()
    return found


class _Keeping:
    """Follows a forward pass from module to module."""

    def __init__(self, model: nn.Module, recomputed: Collection[str]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model, self._recomputed = model, recomputed
        self._running: list[str] = []
        self._inside = 0  # how many recomputed modules are running
        self._weights = {_address(value) for value in (*model.parameters(), *model.buffers())}
        self._kept: dict[int, tuple[str, int, Any]] = {}  # a storage's address: owner, bytes, a weak reference
        self._held: list[Tensor] = []  # what recomputed modules were given

    def by_module(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for owner, size, _ in self._kept.values():
            found[owner] += size
        return dict(found)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            handles.append(module.register_forward_hook(self._left, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(self._names[id(module)])
        if self._running[-1] in self._recomputed:
            if not self._inside:
                given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self._held += [leaf.detach() for leaf in given]
                for leaf in given:
                    self._note(leaf)
            self._inside += 1

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= self._running.pop() in self._recomputed

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self._inside:
            self._note(tensor)
        return tensor.detach()  # the very tensor would keep its own graph alive

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address in self._weights or address in self._kept:
            return
        owner = self._running[-1] if self._running else LOSS
        gone = weakref.ref(storage, lambda _: self._kept.pop(address, None))
        self._kept[address] = owner, storage.nbytes(), gone


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
