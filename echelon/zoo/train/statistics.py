"""Statistics of a model: parameters, multiply-adds and memory of each layer, found with fake tensors.

Multiply-adds are those of matrix products, convolutions and attention in one forward pass of one sample, in evaluation
mode, as papers count them. Activations are the tensors that a training step keeps for its backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.base.formatting import count, percent, size, text_table
from echelon.nn import SparseEmbedding
from echelon.parallel.objective import count_samples
from echelon.plan.fake_forward import allow_real_tensors, placeholder_mode, preserve_rng_state
from echelon.plan.operations import OperationMode, tensors_in
from echelon.plan.saved_bytes import SavedBytes, forget
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.kernel_costs import TracedOperation, kind_of, launches_of
from echelon.planner.profiling.optimizer_state import Known, kept_after_step, owners

#: Number of samples of a pass. It is an odd prime, so a dimension that is a multiple of it is most likely the batch.
SAMPLES = 3


@dataclass(frozen=True)
class LayerStatistics:
    """A module that has parameters itself, or multiplies outside of its submodules.

    shape:         shape of its output, where ``n`` is the number of samples; None if the pass has not reached it
    parameters:    number of its own parameters; a tied parameter counts at its first module
    multiply_adds: number of its own multiply-adds per sample; None if the pass failed
    """

    name: str
    kind: str
    shape: str | None
    parameters: int
    multiply_adds: int | None


@dataclass(frozen=True, kw_only=True)
class ModelStatistics:
    """The layers of a model, and the memory of training in bytes.

    state:       bytes of optimizer state; None if not known
    activations: bytes of activations per sample; None if the pass failed
    samples:     number of samples of the batch whose memory is predicted
    reason:      error of the pass, if it failed
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
        """The memory of a training step with ``samples`` samples, without the parts that are not known."""
        return self.weights + self.gradients + (self.state or 0) + (self.activations or 0) * self.samples


def statistics(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None, samples: int | None = None
) -> ModelStatistics:
    """Return the statistics of a model, which may be on the meta device and is not changed.

    batch:     batch of a task, with the target last
    optimizer: optimizer of the model, for the size of its state
    samples:   number of samples of the batch whose memory is predicted; default that of ``batch``
    """
    reason = ""
    inputs, given = tuple(batch)[:-1], count_samples(batch)
    seen: _ModuleCounts | None = None
    kept: int | None = None
    try:
        few = tree_map(functools.partial(_resized, before=given), inputs)
        seen, kept = _pass(model, few), _kept(model, few)
    except Exception as error:  # the model's own code may raise anything on fake tensors
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    rows = tuple(_rows(model, seen))
    trained = [value for value in model.parameters() if value.requires_grad]
    gradients = sum(value.nbytes for value in trained)
    return ModelStatistics(
        rows=rows,
        parameters=sum(row.parameters for row in rows),
        trained=sum(value.numel() for value in trained),
        multiply_adds=None if seen is None else sum(row.multiply_adds or 0 for row in rows),
        weights=sum(value.nbytes for value in (*model.parameters(), *model.buffers())),
        gradients=gradients,
        state=None if optimizer is None else _state_bytes(optimizer, trained),
        activations=kept,
        samples=samples or given,
        reason=reason,
    )


# ---- a pass on fake tensors ----


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
    """Return the bytes that a training pass keeps for backward, per sample."""
    shadow = _shadow(model)
    saved = SavedBytes((*shadow.parameters(), *shadow.buffers()), keep=forget)
    with placeholder_mode(), allow_real_tensors(), preserve_rng_state(), torch.enable_grad(), saved:
        output = shadow(*tree_map(_placed, inputs))
    del output
    return saved.total // SAMPLES


class _MultiplyAddCounter(OperationMode):  # type: ignore[no-untyped-call]
    """Counts multiply-adds for the innermost running module."""

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
    """Return a copy on fake tensors, in training mode, whose sparse tables return empty rows without a lookup."""
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


def _state_bytes(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state for these parameters; step counts do not count."""
    owned, known = owners(optimizer), Known()
    kept = (each for one in trained for each in kept_after_step(*owned[id(one)], one.shape, one.dtype, known))
    return sum(each.nbytes for each in kept if each.dim())


# ---- text ----


def show(found: ModelStatistics) -> str:
    """Return a table of layers with the sums below it."""
    head = ("layer", "kind", "output", "parameters", "multiply-adds", "share")
    lines = [head, *(_line(row, found.multiply_adds) for row in found.rows)]
    return "\n".join([*text_table(lines, right=(3, 4, 5)), *_sums(found)])


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


def _sums(found: ModelStatistics) -> Iterator[str]:
    frozen = found.parameters - found.trained
    yield f"parameters: {found.parameters:,}" + (f", of which {frozen:,} are not trained" if frozen else "")
    if found.multiply_adds is None:
        yield f"multiply-adds: not known, since the model does not run on fake tensors ({found.reason})"
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
