"""``LocalGradients``: makes torch's clipping functions correct on gradients that are not reduced yet.

Between ``engine.backward`` and ``engine.update`` a gradient is local to its rank. There,
``torch.nn.utils.clip_grad_norm_`` would clip each rank's gradient before the reduction, while one process (and DDP)
clips the sum. Torch's gradient functions are wrapped: gradients are reduced first, or the call raises ``UsageError``
that names the right call.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from echelon.base.errors import UsageError

if TYPE_CHECKING:
    from echelon.engine.forward_backward import ForwardBackward
    from echelon.engine.parallelize import ParallelModel

#: Torch's internal gradient functions, each with its public name and the engine's call to use instead.
_FUNCTIONS = {
    "clip_grad_norm_": ("clip_grad_norm_", "engine.clip_grad_norm_(max_norm), or give Strategy(clip=max_norm)"),
    "clip_grad_value_": ("clip_grad_value_", "engine.clip_grad_value_(clip_value)"),
    "_clip_grads_with_norm_": ("clip_grads_with_norm_", "engine.clip_grad_norm_(max_norm)"),
    "_get_total_norm": ("get_total_norm", "engine.grad_norm()"),
}
#: Number of first updates in which gradients are checked for changes by user code.
EARLY = 2


class LocalGradients:
    """Guards the local gradients of one engine against torch's gradient functions.

    reduce: reduces the gradients of the named optimizers
    """

    def __init__(
        self,
        parts: ParallelModel,
        passes: ForwardBackward,
        reduce: Callable[[Collection[str]], None],
        say: Callable[[str], None],
    ) -> None:
        self._passes, self._reduce, self._say = passes, reduce, say
        plan = parts.plan
        self._is_sharded = plan.shard is not None or plan.is_model_parallel
        self._applied_at_once = plan.low_memory is not None or bool(plan.dgc)
        self._differ = parts.gradients.is_reduced or parts.scaler.active  # local gradients differ from final ones
        self._keys, self._owners = list(parts.optimizers), _owners(parts)
        self._parameters = dict(
            _identified([*parts.local_state.model.parameters(), *parts.local_state.parameters.values()])
        )
        self._checks_left = EARLY if self._differ and not self._is_sharded else 0
        self._seen: list[tuple[int, int]] = []
        self._has_warned = False
        _watch(self)

    def close(self) -> None:
        """Stop guarding the gradients of this engine."""
        _watchers.discard(self)

    def added(self) -> None:
        """Record the versions of the gradients after backward, in the first updates."""
        if self._checks_left:
            self._seen = self._versions()

    def about_to_reduce(self) -> None:
        """Log a warning if user code has changed the gradients since backward."""
        if not self._checks_left or not self._seen:
            return
        self._checks_left -= 1
        if self._passes.is_local and self._versions() != self._seen:
            self._checks_left = 0
            self._say(
                "gradients: they were changed between engine.backward() and engine.update(), where each rank has its "
                "own; a factor or a mask is right there, clipping is not: call engine.reduce() before the change"
            )
        self._seen = []

    def called(self, name: str, given: Collection[Tensor], max_norm: float) -> None:
        """Reduce gradients, warn or raise before torch's function ``name`` runs.

        given: parameters, or gradients for ``get_total_norm``
        """
        found = self._found(name, given)
        if not found:
            return
        known, instead = _FUNCTIONS[name]
        waits = self._passes.is_local and self._differ
        if self._is_sharded or (waits and (self._applied_at_once or name == "_get_total_norm")):
            why = (
                "a rank holds only parts of them"
                if self._is_sharded
                else "until engine.update() they are each rank's own"
            )
            raise UsageError(f"{known}() on the engine's gradients: {why}; call {instead}")
        if waits:
            chosen = {key for parameter in found for key in self._owners.get(id(parameter), ())}
            self._reduce([key for key in self._keys if key in chosen])  # in the same order on all ranks
        elif name != "_get_total_norm" and not self._passes.has_own_loop and math.isfinite(max_norm):
            self._warn(known)

    def _found(self, name: str, given: Collection[Tensor]) -> list[Tensor]:
        known: Mapping[int, Any] = self._parameters
        if name == "_get_total_norm":
            known = dict(_identified(p.grad for p in self._parameters.values() if p.grad is not None))
        return [tensor for tensor in given if id(tensor) in known]

    def _warn(self, known: str) -> None:
        if not self._has_warned and self._passes.has_run:
            self._has_warned = True
            self._say(f"gradients: {known}() after engine.step() has no effect, since the step has applied them; give "
                      "Strategy(clip=max_norm)")  # fmt: skip

    def _versions(self) -> list[tuple[int, int]]:
        grads = [parameter.grad for parameter in self._parameters.values()]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]


def _owners(parts: ParallelModel) -> dict[int, list[str]]:
    """Return the names of the optimizers of each parameter, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for key, optimizer in parts.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(key)
    return owners


def _identified(tensors: Iterable[Any]) -> Iterable[tuple[int, Any]]:
    return ((id(tensor), tensor) for tensor in tensors)


_watchers: weakref.WeakSet[LocalGradients] = weakref.WeakSet()


def _watch(watcher: LocalGradients) -> None:
    """Wrap torch's gradient functions so that they call ``watcher`` first.

    The inner function in their closure is replaced, because scripts may hold references to the outer functions.
    """
    _watchers.add(watcher)
    for name in _FUNCTIONS:
        outer = getattr(clip_grad, name, None)
        cells: tuple[Any, ...] = getattr(outer, "__closure__", None) or ()
        inner = cells[0].cell_contents if len(cells) == 1 else None
        if callable(inner) and not hasattr(inner, "asks_engine"):
            cells[0].cell_contents = _asking(name, inner)


def _asking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asking(*args: Any, **named: Any) -> Any:
        if not _watchers:
            return function(*args, **named)
        key = "tensors" if name == "_get_total_norm" else "parameters"
        given = args[0] if args else named.pop(key)
        tensors = [given] if isinstance(given, Tensor) else list(given)
        limit = named.get("max_norm", args[1] if len(args) > 1 else 0.0)
        for watcher in list(_watchers):
            watcher.called(name, tensors, limit if isinstance(limit, float | int) else 0.0)
        return function(tensors, *args[1:], **named)

    asking.asks_engine = True  # type: ignore[attr-defined]
    return asking


def clip_values(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every entry of the gradients to the range from ``-limit`` to ``limit``."""
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            (grad.values() if grad.is_sparse else grad).clamp_(-limit, limit)
            parameter.grad = grad
