"""Run one stage of a pipeline: the user's whole forward, in which only the units of this stage compute.

A unit of an earlier stage returns the received tensors that this stage needs, and fake tensors for all others, so that
code between units that this stage does not need costs almost nothing. The first call of a later stage's unit ends the
forward.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.base.errors import UsageError
from echelon.parallel.pipeline.inter_stage_cache import MOST_KNOWN, InterStageCache, torch_modes
from echelon.parallel.pipeline.placeholder_pool import PlaceholderPool, fresh_placeholder
from echelon.parallel.tensor.lazy_activation import whole
from echelon.plan.fake_forward import allow_real_tensors, fake_forward, is_placeholder, placeholder
from echelon.plan.module_calls import call_unintercepted, install_call_hooks, intercept_module_calls, mark_remote_stage
from echelon.plan.pytree import FlattenedTree, take_apart, tensors_of
from echelon.plan.stage_trace import StageTrace

Part = Literal["B", "I", "W"]
AUXILIARY = "auxiliary_loss"


class DeferredWeightGrads(Protocol):
    """A context around forward and backward that leaves out gradients of weights; ``run`` computes them later."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def run(self) -> None: ...


class BatchLoss(Protocol):
    """A callable that returns the model's output and loss for a batch."""

    def __call__(self, batch: Any) -> tuple[Any, Tensor]: ...

    def take_seen(self) -> Any: ...


class StageLossWeights(Protocol):
    """The factors of the losses of each micro-batch in backward."""

    def of_loss(self, micro: int, loss: Tensor) -> Tensor | float: ...

    def of_auxiliary(self, micro: int) -> Tensor | float: ...


Weighted = tuple[Tensor, Tensor | float]


class PassEnded(BaseException):
    """Raised when the first unit of a later stage is called.

    It is not an Exception, so that user code that catches Exception does not catch it.
    """


Seen = dict[str, FlattenedTree]  # outputs of units as fake tensors, by call


class StageRunner:
    """Runs the stages of this rank, one micro-batch at a time, in the order of a schedule."""

    def __init__(
        self,
        model: nn.Module,
        call: BatchLoss,
        recording: StageTrace,
        stages: Sequence[int],
        device: torch.device,
        defer: Callable[[], DeferredWeightGrads] | None = None,
    ) -> None:
        self._call = call
        self._recording = recording
        self._device = device
        self._defer = defer
        modules = dict(model.named_modules(remove_duplicate=False))
        self._units = {name: modules[name] for name in recording.units}
        self._plans = {stage: _StagePlan(recording, stage) for stage in stages}
        self._own = {
            stage: [part for name, at in recording.units.items() if at == stage for part in self._units[name].modules()]
            for stage in stages
        }
        self._cache = InterStageCache()
        self._forecast = _ShapeForecast(self._cache)
        self._known_placeholders: dict[Hashable, Tensor] = {}
        self._seen: dict[int, Seen] = {}
        self._running: dict[tuple[int, int], _BackwardContext] = {}
        self._deferred: dict[tuple[int, int], DeferredWeightGrads] = {}
        self._batches: Sequence[Any] = ()
        self._weights: StageLossWeights | None = None  # None when not training
        self._training = False
        self.losses: dict[int, Tensor] = {}  #: per micro-batch, unweighted; only on the rank of the last stage
        self.auxiliary: dict[int, Tensor] = {}  #: per micro-batch, unweighted: the sum over this rank's units
        self.seen: dict[int, Any] = {}  #: per micro-batch, a record of how the loss was computed
        self.outputs: dict[int, Any] = {}  #: per micro-batch, if not training; only on the rank of the last stage
        self._undo = install_call_hooks(model, recording.units)
        for name, stage in recording.units.items():
            if stage not in stages:
                mark_remote_stage(self._units[name], stage)

    def close(self) -> None:
        """Remove the call hooks from the model."""
        self._undo()

    def begin(self, micro_batches: Sequence[Any], weights: StageLossWeights | None) -> None:
        """Begin a step.

        weights:  factors of each micro-batch's losses in backward; None for forward without training
        """
        self._batches, self._weights, self._training = micro_batches, weights, weights is not None
        self._running.clear()  # left from a step that was aborted
        # If several stages are on this rank, outputs of units of one stage are known to the others.
        self._seen = {micro: {} for micro in range(len(micro_batches))} if len(self._plans) > 1 else {}
        self._deferred.clear()
        self.losses = {}
        self.auxiliary = {}
        self.outputs = {}
        self.seen = {}

    # ---- forward ----

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        """Return the tensors that other stages need, by key; they require a gradient if this stage can use one.

        received:  leaves, which require a gradient if the stage that made them can use one
        """
        plan = self._plans[stage]
        _forget_auxiliary(self._own[stage])
        leaves = {key: _as_leaf(tensor) for key, tensor in received.items()}
        placeholders = PlaceholderPool(self._known_placeholders, (stage, micro))
        running = _Pass(plan, self._units, leaves, self._forecast, self._cache, placeholders, self._seen.get(micro))
        deferred = self._defer() if self._defer and self._training else None
        with torch.set_grad_enabled(self._training), deferred or contextlib.nullcontext():
            result = running.run(self._call, plan.batch(self._batches[micro], placeholders))
        roots = {key: running.made.get(key) for key in plan.sent}
        ends = self._collect_auxiliary(stage, micro)
        if plan.is_last:
            ends += self._collect_result(micro, result)
        if self._training:
            self._running[stage, micro] = _BackwardContext(roots, ends, leaves)
            if deferred:
                self._deferred[stage, micro] = deferred
        return {key: None if root is None else _to_send(root) for key, root in roots.items()}

    def _collect_result(self, micro: int, result: tuple[Any, Tensor] | None) -> list[Weighted]:
        if result is None or any(map(is_placeholder, tensors_of(result[1] if self._training else result))):
            raise _other_way("the loss")
        output, loss = result
        self.losses[micro] = loss.detach()
        if self._weights is not None:
            return [(loss, self._weights.of_loss(micro, loss))]
        self.outputs[micro], self.seen[micro] = output, self._call.take_seen()
        return []

    def _collect_auxiliary(self, stage: int, micro: int) -> list[Weighted]:
        left = [part.__dict__[AUXILIARY] for part in self._own[stage] if AUXILIARY in part.__dict__]
        result = [value for value in left if value is not None]
        for value in result:
            self.auxiliary[micro] = self.auxiliary.get(micro, torch.zeros((), device=value.device)) + value.detach()
        if result:
            _forget_auxiliary(self._own[stage])
        weight = self._weights.of_auxiliary(micro) if result and self._weights is not None else 0.0
        return [(value, weight) for value in result]

    # ---- backward ----

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: Part
    ) -> Mapping[str, Tensor | None]:
        """Return the gradients of the tensors that forward received.

        gradients:  gradients of the tensors that forward returned
        part:       B computes all gradients; I leaves gradients of weights for W, if they can be deferred
        """
        if part == "W":
            self._run_deferred(stage, micro)
            return {}
        kept = self._running.pop((stage, micro))
        with self._deferred.get((stage, micro)) or contextlib.nullcontext():
            kept.backward(gradients)
        _forget_auxiliary(self._own[stage])  # recomputation has set them again
        if part == "B":
            self._run_deferred(stage, micro)
        return {key: leaf.grad for key, leaf in kept.leaves.items()}

    def _run_deferred(self, stage: int, micro: int) -> None:
        deferred = self._deferred.pop((stage, micro), None)
        if deferred is not None:
            deferred.run()


class _StagePlan:
    """The part of the recorded trace that concerns one stage."""

    def __init__(self, recording: StageTrace, stage: int) -> None:
        self.stage, self.is_last, self.units = stage, stage == recording.stages - 1, recording.units
        out = [one for one in recording.transfers if one.source == stage]
        self.sent = tuple(dict.fromkeys(one.key for one in out))
        self.copied = {one.key for one in out if one.changed_at_source}
        self.kept = set(recording.kept[stage])
        self.changed = {one.key for one in recording.transfers if one.target == stage and one.changed_at_target}
        self._inputs, self._written = recording.inputs[stage], recording.written
        self.own = {name for name, at in recording.units.items() if at == stage}

    def batch(self, whole: Any, placeholders: PlaceholderPool) -> Any:
        """Return the batch with fake tensors for parts that this stage does not need, and copies of changed parts.

        Changed parts are those that the forward changes in place.
        """
        flat = type(whole) is tuple and all(isinstance(leaf, Tensor) for leaf in whole)
        leaves, structure = (whole, None) if flat else tree_flatten(whole)
        if len(leaves) != len(self._inputs):
            raise UsageError(
                f"the batch has {len(leaves)} parts, but had {len(self._inputs)} when stages were cut; give batches of "
                "one structure"
            )
        local = [
            leaf if not isinstance(leaf, Tensor) else self._leaf(at, leaf, needed, placeholders)
            for at, (leaf, needed) in enumerate(zip(leaves, self._inputs, strict=True))
        ]
        return tuple(local) if structure is None else tree_unflatten(local, structure)

    def _leaf(self, at: int, leaf: Tensor, needed: bool, placeholders: PlaceholderPool) -> Tensor:
        if not needed:
            return placeholders.given(f"batch/{at}", leaf)
        return leaf.clone() if at in self._written else leaf


class _BackwardContext:
    """The tensors that backward of one pass needs."""

    def __init__(self, roots: Mapping[str, Tensor | None], ends: list[Weighted], leaves: Mapping[str, Tensor]) -> None:
        self._roots, self._ends, self.leaves = roots, ends, leaves

    def backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        tensors: list[Tensor] = [end * weight for end, weight in self._ends if end.requires_grad]
        given: list[Tensor | None] = [None] * len(tensors)
        for key, root in self._roots.items():
            gradient = gradients.get(key)
            if root is not None and root.requires_grad and gradient is not None:
                tensors.append(root)
                given.append(gradient)
        self._roots, self._ends = {}, []
        if tensors:
            torch.autograd.backward(tensors, given)


# ---- one pass ----

T = TypeVar("T")


class _Pass:
    """Handles the calls of units while the user's forward runs for one stage."""

    def __init__(
        self,
        plan: _StagePlan,
        units: Mapping[str, nn.Module],
        received: Mapping[str, Tensor],
        forecast: _ShapeForecast,
        cache: InterStageCache,
        placeholders: PlaceholderPool,
        seen: Seen | None,
    ) -> None:
        self._plan = plan
        self._units = units
        self._received = received
        self._seen = seen
        self._forecast = forecast
        self._cache = cache
        self._placeholders = placeholders
        self._calls: Counter[str] = Counter()
        self._versions: dict[str, int] = {}
        self.made: dict[str, Tensor] = {}  #: tensors that other stages need

    def run(self, call: Callable[[Any], T], batch: Any) -> T | None:
        """Return the result of ``call``, or None if this stage ends before ``call`` does."""
        try:
            with intercept_module_calls(self._unit_called), allow_real_tensors(), self._cache:
                result: T | None = call(batch)
        except PassEnded:
            result = None
        except Exception as error:
            if not _about_placeholders(error):
                raise
            if not self._is_done():
                raise _other_way(f"stage {self._plan.stage}") from None
            result = None  # only code of later stages was left, and it reads values of fake tensors
        finally:
            self._placeholders.drop_changed()
        self._refuse_changes()
        return result

    def _unit_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self._plan.units[name]
        if module is not self._units[name]:  # a copy of the unit
            return call_unintercepted(module, args, kwargs)
        if stage > self._plan.stage:
            raise PassEnded
        prefix = f"{name}#{self._calls[name]}"
        self._calls[name] += 1
        if stage < self._plan.stage:
            return self._foreign(name, prefix, module, args, kwargs)
        return self._own(name, prefix, call_unintercepted(module, args, kwargs))

    def _foreign(self, name: str, prefix: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = self._seen.get(prefix) if self._seen is not None else None
        parts = seen or self._forecast.on(name, module, args, kwargs)
        return parts.together([self._arrived(f"{prefix}/{at}", leaf) for at, leaf in enumerate(parts.leaves)])

    def _arrived(self, key: str, leaf: Any) -> Any:
        if key not in self._received:
            return self._placeholders.made(key, leaf) if isinstance(leaf, Tensor) else leaf
        tensor = self._received[key]
        return tensor.clone() if key in self._plan.changed else tensor

    def _own(self, name: str, prefix: str, output: Any) -> Any:
        parts = take_apart(whole(output))  # a tensor that is split over ranks is gathered where a unit ends
        if any(map(is_placeholder, parts.leaves)):
            raise _other_way(f"'{name}'")
        if self._seen is not None:
            self._seen[prefix] = self._for_other_stages(prefix, parts)
        return parts.together(
            [
                self._leaving(f"{prefix}/{at}", leaf) if isinstance(leaf, Tensor) else leaf
                for at, leaf in enumerate(parts.leaves)
            ]
        )

    def _for_other_stages(self, prefix: str, output: FlattenedTree) -> FlattenedTree:
        return take_apart(output.together(self._placeholders.all_made(f"seen/{prefix}", output.leaves)))

    def _leaving(self, key: str, leaf: Tensor) -> Tensor:
        """Return the tensor for the user's code in this pass: a fake one if only other stages use it."""
        if key in self._plan.sent:
            self.made[key] = leaf.clone() if key in self._plan.copied and key in self._plan.kept else leaf
            self._versions[key] = self.made[key]._version
        return leaf if key in self._plan.kept else self._placeholders.made(key, leaf)

    def _is_done(self) -> bool:
        return all(self._calls[name] for name in self._plan.own) and set(self._plan.sent) <= set(self.made)

    def _refuse_changes(self) -> None:
        for key, made in self.made.items():
            if made._version != self._versions[key]:
                raise UsageError(
                    f"the forward changes the output of '{key.rpartition('#')[0]}' in place, and did not when stages "
                    "were cut; change a copy of it"
                )


class _ShapeForecast:
    """Outputs of units of other stages as fake tensors, computed once per unit and kind of input."""

    def __init__(self, cache: InterStageCache) -> None:
        self._cache = cache
        self._known: dict[Hashable, FlattenedTree] = {}

    def on(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlattenedTree:
        """Return the output of a unit as fake tensors.

        For the same fake tensor objects as in an earlier pass, InterStageCache finds it by their identity.
        """
        question = self._cache.question(name, module.training, args, kwargs)
        if question is None:
            return self._forecast(name, module, args, kwargs)
        known = self._cache.recall(question[0]) or self._cache.keep(
            *question, [], self._forecast(name, module, args, kwargs)
        )
        result: FlattenedTree = known.result
        return result

    def _forecast(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlattenedTree:
        given = take_apart((args, kwargs))
        key = (name, module.training, torch_modes(), given.pattern, *map(_looks, given.leaves))
        try:
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that cannot be compared
            return self._run_fake(module, args, kwargs)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        return self._known.setdefault(key, self._run_fake(module, args, kwargs))

    def _run_fake(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlattenedTree:
        with torch._C.DisableTorchFunction():  # split_backward.py must not count this as a use of weights
            return _bare(take_apart(fake_forward(module, args, kwargs)))


def _bare(output: FlattenedTree) -> FlattenedTree:
    """Return the output with new fake tensors: the autograd graph of the given ones keeps tensors of a pass alive."""
    again = take_apart(output.together(placeholder(x) if isinstance(x, Tensor) else x for x in output.leaves))
    fakes = [fresh_placeholder(leaf) if isinstance(leaf, Tensor) else leaf for leaf in again.leaves]
    return FlattenedTree(fakes, again.pattern, again.together)


def _looks(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.layout
    return type(leaf), leaf


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _to_send(root: Tensor) -> Tensor:
    """Return the tensor without its autograd graph, which would live as long as the message."""
    return root.detach().requires_grad_(root.requires_grad)


def _forget_auxiliary(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        if AUXILIARY in part.__dict__:
            part.__dict__[AUXILIARY] = None


def _about_placeholders(error: Exception) -> bool:
    """Return True if the error says that an operation needs the values of a fake tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def _other_way(what: str) -> UsageError:
    return UsageError(
        f"{what} needs a value that it did not need when stages were cut: the forward takes another path now; decide "
        "inside a module with a stage, or cut the stages with a batch that takes this path"
    )
