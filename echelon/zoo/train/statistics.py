"""Statistics: what a model consists of and costs, layer by layer, found on placeholders: nothing is computed.

Multiply-adds are those of products, convolutions and attention in one forward pass of one sample, in evaluation mode,
as papers count them. Activations are what a training step keeps for its backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.base.formatting import count, percent, size
from echelon.nn import SparseEmbedding
from echelon.parallel.objective import count_samples
from echelon.plan.fake_forward import allow_real_tensors, placeholder_mode, preserve_rng_state
from echelon.plan.operations import OperationMode, tensors_in
from echelon.plan.saved_bytes import SavedBytes, forget
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.kernel_costs import TracedOperation, kind_of, launches_of

#: Samples of a pass. An odd prime, so that a dimension that is a multiple of it is most likely the batch's.
SAMPLES = 3

#: Tensors of a parameter's shape that an optimizer keeps for it, with the defaults of ``echelon train``.
STATES = {
    "sgd": 0,
    "momentum": 1,
    "lars": 1,
    "adagrad": 1,
    "rmsprop": 2,
    "adadelta": 2,
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "ftrl": 2,
}


@dataclass(frozen=True)
class LayerStatistics:
    """A module that has parameters of its own, or multiplies without being told by a part of it.

    shape:         of its output, ``n`` being the samples; None where no pass has reached it
    parameters:    its own; a tied one counts where it is first
    multiply_adds: its own, for a sample; None where no pass could be made
    """

    name: str
    kind: str
    shape: str | None
    parameters: int
    multiply_adds: int | None


@dataclass(frozen=True, kw_only=True)
class ModelStatistics:
    """A model's layers, and in bytes what training takes.

    activations: for one sample; None where no pass could be made, and ``reason`` says why
    state:       of the optimizer; None where it is not known
    samples:     of the batch whose memory is foretold
    """

    rows: tuple[LayerStatistics, ...]
    parameters: int
    trained: int
    multiply_adds: int | None
    weights: int
    gradients: int
    state: int | None
    activations: int | None
    samples: int
    reason: str = ""

    @property
    def memory(self) -> int:
        """Of a training step on such a batch, as far as it is known."""
        return self.weights + self.gradients + (self.state or 0) + (self.activations or 0) * self.samples


def statistics(
    model: nn.Module, batch: Any, optimizer: str | None = None, samples: int | None = None
) -> ModelStatistics:
    """``batch`` is a task's, the target last. The model, which may be on the meta device, is left as it was.

    optimizer: one of ``--optimizer``, for the size of its state
    samples:   of the batch whose memory is foretold, where that is another than this one
    """
    reason = ""
    inputs, given = tuple(batch)[:-1], count_samples(batch)
    seen: _ModuleCounts | None = None
    kept: int | None = None
    try:
        few = tree_map(functools.partial(_resized, before=given), inputs)
        seen, kept = _pass(model, few), _kept(model, few)
    except Exception as error:  # whatever the model's own code makes of placeholders
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    rows = tuple(_rows(model, seen))
    trained = [value for value in model.parameters() if value.requires_grad]
    gradients = sum(map(_bytes, trained))
    states = STATES.get(optimizer or "")
    return ModelStatistics(
        rows=rows,
        parameters=sum(row.parameters for row in rows),
        trained=sum(value.numel() for value in trained),
        multiply_adds=None if seen is None else sum(row.multiply_adds or 0 for row in rows),
        weights=sum(map(_bytes, (*model.parameters(), *model.buffers()))),
        gradients=gradients,
        state=None if states is None else states * gradients,
        activations=kept,
        samples=samples or given,
        reason=reason,
    )


# ---- a pass on placeholders ----


@dataclass
class _ModuleCounts:
    shapes: dict[str, str] = field(default_factory=dict)
    multiply_adds: dict[str, int] = field(default_factory=dict)


def _pass(model: nn.Module, inputs: tuple[Any, ...]) -> _ModuleCounts:
    shadow = _shadow(model).eval()
    counting = _MultiplyAddCounter()
    for name, module in shadow.named_modules():
        module.register_forward_pre_hook(counting.enters(name))
        module.register_forward_hook(counting.leaves(name))
    with placeholder_mode(), allow_real_tensors(), preserve_rng_state(), torch.enable_grad(), counting:
        shadow(*tree_map(_placed, inputs))
    return counting.seen


def _kept(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that a training pass keeps for backward, for one sample."""
    shadow = _shadow(model)
    saved = SavedBytes((*shadow.parameters(), *shadow.buffers()), keep=forget)
    with placeholder_mode(), allow_real_tensors(), preserve_rng_state(), torch.enable_grad(), saved:
        output = shadow(*tree_map(_placed, inputs))
    del output
    return saved.total // SAMPLES


class _MultiplyAddCounter(OperationMode):  # type: ignore[no-untyped-call]
    """Counts for the innermost module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = _ModuleCounts()
        self._running = [""]

    def enters(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def leaves(self, name: str) -> Callable[..., None]:
        def left(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            self.seen.shapes.setdefault(name, _shapes(output))

        return left

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if kind_of(func) in ("product", "convolution", "attention"):
            done = TracedOperation(func, args, tensors_in((args, kwargs)), tensors_in(result))
            flops = sum(launch.flops for _, launch in launches_of(done))
            name, known = self._running[-1], self.seen.multiply_adds
            known[name] = known.get(name, 0) + round(flops / 2 / SAMPLES)
        return result


def _shadow(model: nn.Module) -> nn.Module:
    """A copy that holds nothing, in training mode. Its tables, whose rows are elsewhere, look nothing up."""
    shadow = FakeModel(model, ()).model
    for module in shadow.modules():
        if isinstance(module, SparseEmbedding):
            module.forward = functools.partial(_row_shapes, module)  # type: ignore[method-assign]
    return shadow


def _row_shapes(table: SparseEmbedding, ids: Tensor, weights: Any = None, offsets: Tensor | None = None) -> Tensor:
    bags = ids.shape if table.combiner is None else ids.shape[:-1] if offsets is None else offsets.shape
    return torch.empty(*bags, table.dim, requires_grad=True)


def _resized(leaf: Any, before: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != before:
        return leaf
    return torch.empty((SAMPLES, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")


def _placed(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _shapes(output: Any) -> str:
    return ", ".join(_shape(tensor.shape) for tensor in tensors_in(output))


def _shape(shape: Sequence[int]) -> str:
    words = [str(length) for length in shape]
    if shape and shape[0] and shape[0] % SAMPLES == 0:
        words[0] = "n" if shape[0] == SAMPLES else f"{shape[0] // SAMPLES}n"
    return f"[{', '.join(words)}]"


# ---- rows ----


def _rows(model: nn.Module, seen: _ModuleCounts | None) -> Iterator[LayerStatistics]:
    counted: set[int] = set()
    for name, module in model.named_modules():
        fresh = {id(value): value.numel() for value in module.parameters(recurse=False) if id(value) not in counted}
        counted |= fresh.keys()
        own = None if seen is None else seen.multiply_adds.get(name, 0)
        if fresh or own or isinstance(module, SparseEmbedding):
            shape = seen.shapes.get(name) if seen else None
            yield LayerStatistics(name or "(model)", type(module).__name__, shape, sum(fresh.values()), own)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


# ---- in words ----


def show(found: ModelStatistics) -> str:
    """A table of layers, and the sums below it."""
    head = ("layer", "kind", "output", "parameters", "multiply-adds", "share")
    lines = [head, *(_line(row, found.multiply_adds) for row in found.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([*table, *_sums(found)])


def _line(row: LayerStatistics, total: int | None) -> tuple[str, ...]:
    known = row.multiply_adds is not None
    share = percent((row.multiply_adds or 0) / total) if known and total else "-"
    return (
        row.name,
        row.kind,
        row.shape or "-",
        f"{row.parameters:,}",
        f"{row.multiply_adds:,}" if known else "-",
        share,
    )


def _aligned(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Words to the left, numbers to the right."""
    for column, (word, width) in enumerate(zip(line, widths, strict=True)):
        yield word.ljust(width) if column < 3 else word.rjust(width)


def _sums(found: ModelStatistics) -> Iterator[str]:
    frozen = found.parameters - found.trained
    yield f"parameters: {found.parameters:,}" + (f", of which {frozen:,} are not trained" if frozen else "")
    if found.multiply_adds is None:
        yield f"multiply-adds: not known, since the model does not run on placeholders ({found.reason})"
    else:
        yield f"multiply-adds: {count(found.multiply_adds)} a sample, forward"
    yield "memory: " + ", ".join(f"{name} {size(part)}" for name, part in _memory(found).items())


def _memory(found: ModelStatistics) -> Mapping[str, int]:
    parts = {"weights": found.weights, "gradients": found.gradients}
    if found.state is not None:
        parts["optimizer state"] = found.state
    if found.activations is not None:
        parts[f"activations of {found.samples} samples"] = found.activations * found.samples
    return parts | {"in all": found.memory}
