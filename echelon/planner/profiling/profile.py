"""Profile: the costs of a model, traced on fake tensors, without a GPU, computation or changes to the model."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.dynamo_stub import without_dynamo
from echelon.base.errors import EchelonError, UsageError, first_line
from echelon.base.symbolic_shapes_stub import without_symbolic_shapes
from echelon.plan.partition import find_units
from echelon.planner.model_costs import ModelCosts, ModelUnit
from echelon.planner.profiling.compiled_pass import compile_pass
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_split import fake_process_group, split_first
from echelon.planner.profiling.fake_step import FakePass, run_fake_step
from echelon.planner.profiling.layer_probe import LayerProbe
from echelon.planner.profiling.recompute_costs import crossings, figures_again
from echelon.planner.profiling.resize import RULES, find_rows, resize
from echelon.planner.profiling.splits import find_marks, most
from echelon.planner.profiling.unit_costs import (
    Groups,
    UnitActivationBytes,
    UnitPassSpans,
    UnitTensors,
    alike,
    between,
    carried,
    group_calls,
    identity,
    mark_weight_kernels,
    spans_of,
    unit,
    unit_tensors,
)
from echelon.strategy.annotations.marks import Split

DeviceKind = Literal["cuda", "cpu"]
Step = Callable[[nn.Module, Any], Tensor]

#: Samples of the two passes from which all other sizes are interpolated. Not 1, because batch norm raises for one row
#: and squeeze() drops the dimension.
SIZES = (2, 3)
OR_ELSE = "either it fails on such a batch, or its forward reads values, and fake tensors have only shapes"

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    call: Step | None = None,
    name: str = "",
    device: DeviceKind | None = None,
) -> Profile:
    """Profile the training of a model, without its memory and its devices.

    model:  torch module
    batch:  batch as in ``Engine.step``
    loss:   loss as in ``distribute``
    call:   function ``call(model, batch)`` that returns the loss; default: ``loss(model(x), y)``
    name:   name of the profile; default: name of the model's class
    device: kind of device whose kernels are counted; default: that of the parameters

    >>> profile = echelon.planner.profile(model, (x, y), loss=loss)
    """
    kind = device or _device_of(model)
    return Profile(model, batch, call or functools.partial(_objective, loss), name or type(model).__name__, kind)


def _device_of(model: nn.Module) -> DeviceKind:
    first = next(model.parameters(), None)
    return "cpu" if first is not None and first.device.type == "cpu" else "cuda"


def _objective(loss: Callable[..., Tensor] | None, model: nn.Module, batch: Any) -> Tensor:
    from echelon.parallel.objective import Objective

    return Objective(model, loss, None, torch.device("cpu"))(batch)[1]


class Profile:
    """A model's units and their costs, for any number of samples, any split and amp. Implements ``ProfileLike``.

    model:      torch module
    batch:      batch as in ``Engine.step``
    step:       function ``step(model, batch)`` that returns the loss
    name:       name of the profile
    device:     kind of device whose kernels are counted
    units:      names of the modules that are units; default: found automatically
    splits:     marks of the modules to split; default: found automatically
    spread:     True if ranks of the split have batches of their own; default False

    Attributes of the profile:
    members:    names of all modules of every unit; ``names`` has only the first of each
    parameters: (name, entries, dtype, True if trained, index of the first unit that needs it) for each parameter

    >>> profile = echelon.planner.profile(model, (x, y), loss=loss)
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        step: Step,
        name: str,
        device: DeviceKind,
        units: Sequence[str] = (),
        splits: Mapping[str, Split] | None = None,
        spread: bool = False,
    ) -> None:
        from echelon.parallel.objective import count_samples

        self.name, self.device, self.batch = name, device, count_samples(batch)
        self._model, self._example, self._step = model, batch, step
        self._unit_names, self._spread = list(units) or find_units(model) or [""], spread
        if splits is not None:
            self.split_marks = dict(splits)
        self._measured: dict[Any, _Measured] = {}
        self._sheets: dict[Any, ModelCosts] = {}
        first = self._first_measured()
        self._groups: Groups = first.groups
        self.names = tuple(first.passes[0].calls[group[0]].name for group in self._groups)
        self.members = tuple(
            tuple(dict.fromkeys(first.passes[0].calls[at].name for at in group)) for group in self._groups
        )
        self.ties = tuple(first.ties())
        self.parameters = first.parameters()

    @property
    def model(self) -> nn.Module:
        """The model that was profiled."""
        return self._model

    @property
    def step(self) -> Step:
        """The function ``step(model, batch)`` that returns the loss."""
        return self._step

    def cut(self, units: Sequence[str], splits: Mapping[str, Split], spread: bool) -> Profile:
        """Return a profile of the same step with these units and splits."""
        return Profile(self._model, self._example, self._step, self.name, self.device, units, splits, spread)

    def placeholders(self, samples: int) -> Any:
        """Return a batch of ``samples`` samples without data. Raises UsageError if the batch cannot be resized."""
        if self._sizes != SIZES and samples != self.batch:
            raise UsageError(
                f"'{self.name}': its batch of {self.batch} is known as a whole only, since the model does not run on "
                f"{SIZES[0]} of its rows ({self._reason}); give it samples in the first dimension of each tensor"
            )
        return tree_map(lambda leaf: resize(leaf, self._rule, self.batch, samples), self._example)

    @functools.cached_property
    def compiled(self) -> CompiledProfile:
        """The same model as compiled code."""
        return CompiledProfile(self)

    def sheet(self, samples: int, split: int = 1, amp: str | None = None, compiled: bool = False) -> ModelCosts:
        key = (samples, split, amp, compiled)
        if key not in self._sheets:
            measured = self._measured_for(samples, split, amp, compiled)
            tied = tuple(measured.ties().values())
            self._sheets[key] = ModelCosts(measured.units(samples), samples, split, amp, self._given(samples), tied)
        return self._sheets[key]

    def _given(self, samples: int) -> float:
        resized = tree_leaves(self.placeholders(samples))
        return float(sum(leaf.numel() * leaf.element_size() for leaf in resized if isinstance(leaf, Tensor)))

    def _measured_for(self, samples: int, split: int, amp: str | None, compiled: bool) -> _Measured:
        if amp is not None and amp not in _AMP:
            raise UsageError(f"amp '{amp}' is unknown; there are {', '.join(_AMP)}")
        measured = self._measured_at(split, amp, self._sizes, compiled)
        if not measured.is_affine or self._sizes != SIZES:
            measured = self._measured_at(split, amp, (samples, samples), compiled)
        return measured

    def _measured_at(self, split: int, amp: str | None, sizes: tuple[int, int], compiled: bool) -> _Measured:
        key = (split, amp, sizes, compiled)
        if key not in self._measured:
            if compiled:
                self._measured[key] = self._measured_at(split, amp, sizes, False).as_compiled()
            else:
                self._measured[key] = self._measure(split, amp, sizes)
        return self._measured[key]

    def _first_measured(self) -> _Measured:
        """Find the rule that resizes the batch, and measure with it.

        If the model runs with no other size, only the whole batch is measured.
        """
        tried: dict[Any, UsageError] = {}
        self._sizes = SIZES
        for self._rule in RULES:
            shapes = str([getattr(leaf, "shape", None) for leaf in tree_leaves(self.placeholders(SIZES[0]))])
            if shapes not in tried:
                try:
                    return self._measure(1, None, SIZES)
                except UsageError as error:
                    tried[shapes] = error
        self._rule, self._sizes, first = find_rows, (self.batch, self.batch), next(iter(tried.values()))
        self._reason = first_line(first.__cause__ or first)[:200]
        return self._measure(1, None, self._sizes)

    def _measure(self, split: int, amp: str | None, sizes: tuple[int, int]) -> _Measured:
        with self._untraced():
            shadow = FakeModel(self._model, self._unit_names, self.split_marks if split > 1 else ())
            with fake_process_group(split) as group:
                if split > 1:
                    split_first(shadow, self.split_marks, group, self._spread)
                shadow.track_units(self._unit_names)
                passes = [self._rehearse(shadow, size, amp) for size in dict.fromkeys(sizes)]
        if not passes[0].calls and self._unit_names != [""]:
            self._unit_names = [""]  # forward calls no unit: its blocks are unused, or only their weights are
            return self._measure(split, amp, sizes)
        groups = self._groups if hasattr(self, "_groups") else None
        measured = _Measured(self._model, shadow, (passes[0], passes[-1]), sizes, groups)
        self._measured[(split, amp, sizes, False)] = measured
        return measured

    @contextlib.contextmanager
    def _untraced(self) -> Iterator[None]:
        """Do without torch's tracer and symbolic shapes if no code compiles: all is torch's or this package's."""
        own = [type(module).__module__ for module in self._model.modules()]
        if isinstance(self._step, functools.partial):
            own += [getattr(part, "__module__", None) or "" for part in (self._step.func, *self._step.args) if part]
        else:
            own.append("")
        known = ("torch.nn.", "torch._C", "echelon.planner.profiling.")
        with contextlib.ExitStack() as within:
            if all(name.startswith(known) for name in own):
                within.enter_context(without_dynamo())
                within.enter_context(without_symbolic_shapes())
            yield

    def _rehearse(self, shadow: FakeModel, samples: int, amp: str | None, backward: bool = True) -> FakePass:
        batch = self.placeholders(samples)
        try:
            with _unlogged():
                return run_fake_step(
                    shadow, batch, self._step, _AMP[amp] if amp else None, self.device == "cuda", backward
                )
        except EchelonError:
            raise
        except Exception as error:
            words = (str(error).splitlines() or [""])[0].rstrip(".")
            looks = any(sign in type(error).__name__ for sign in ("DataDependent", "DynamicOutput", "Unsupported"))
            advice = "its forward must run on shapes alone, without reading values" if looks else OR_ELSE
            raise UsageError(f"'{self.name}' cannot be profiled: {type(error).__name__}: {words}; {advice}") from error

    # ---- splits ----

    @functools.cached_property
    def split_marks(self) -> dict[str, Split]:
        """Marks of the modules to split, by name; empty if no split is worthwhile."""
        with self._untraced():
            like = FakeModel(self._model, self._unit_names).like
            return find_marks(self._model, like, self._attempt)

    @functools.cached_property
    def splits(self) -> int:
        """Largest possible size of the split axis."""
        return most(self._model, self.split_marks) if self.split_marks else 1

    def _attempt(self, marks: dict[str, Split], probe: LayerProbe | None = None) -> FakePass:
        shadow = FakeModel(self._model, self._unit_names, marks)
        with fake_process_group(2) as group:
            split_first(shadow, marks, group)
            if probe is not None:
                probe.attach(shadow.model)
            shadow.track_units(self._unit_names)
            return self._rehearse(shadow, self._sizes[0], None, backward=False)


class CompiledProfile:
    """A profile whose units are compiled. Implements ``ProfileLike``."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        return self._profile.sheet(samples, split, amp, compiled=True)


class _Measured:
    """Two traced passes of one fake model, with the numbers of samples in ``sizes``."""

    def __init__(
        self,
        model: nn.Module,
        shadow: FakeModel,
        passes: tuple[FakePass, FakePass],
        sizes: tuple[int, int],
        groups: Groups | None,
    ) -> None:
        self._model, self.passes, self._sizes, self._shadow = model, passes, sizes, shadow
        small, large = passes
        self.groups = groups if groups is not None else group_calls(small)
        for passed in dict.fromkeys(self.passes):
            mark_weight_kernels(passed)
        self._held: list[UnitTensors] = unit_tensors(model, shadow, small, self.groups)
        self._carried: list[list[UnitActivationBytes]] = [carried(passed, self.groups) for passed in self.passes]
        self._crossings = [crossings(passed, self.groups) for passed in self.passes]
        self._spans: list[list[UnitPassSpans]] = [
            [spans_of(passed, self.groups, index) for index in range(len(self.groups))] for passed in self.passes
        ]
        self.is_affine = len(small.calls) == len(large.calls) and all(map(alike, *self._spans))

    def as_compiled(self) -> _Measured:
        """Return the same passes as compiled code runs them."""
        found = {id(passed): compile_pass(passed) for passed in self.passes}
        passes = (found[id(self.passes[0])], found[id(self.passes[1])])
        return _Measured(self._model, self._shadow, passes, self._sizes, self.groups)

    def units(self, samples: int) -> tuple[ModelUnit, ...]:
        first, second = self._sizes
        at = (samples - first) / (second - first) if second != first else 0.0
        made: dict[Any, ModelUnit] = {}
        found = []
        for index in range(len(self.groups)):
            figures = self._figures(index, at)
            key = (index == 0, identity(self.passes[0], self.groups, index), *figures.items())
            if key not in made:
                figures |= figures_again(self.passes, self.groups, index, at)
                name = self.passes[0].calls[self.groups[index][0]].name
                made[key] = unit(name, self._spans[0][index], self._spans[1][index], at, figures)
            found.append(made[key])
        return tuple(found)

    def _figures(self, index: int, at: float) -> dict[str, float]:
        held, few, many = self._held[index], self._carried[0][index], self._carried[1][index]
        values = held.parameters.values()
        sizes = [value.numel() * value.element_size() for value in values]
        return {
            "weights": float(sum(value.numel() for value in values)),
            "trained": float(sum(value.numel() for value in values if value.requires_grad)),
            "weight_bytes": float(sum(sizes)),
            "largest_weight": float(max(sizes, default=0)),
            "saved": between(few.saved, many.saved, at),
            "received": between(few.received, many.received, at),
            "output": between(few.output, many.output, at),
            "buffers": float(sum(each.numel() * each.element_size() for each in held.buffers.values())),
            "norm_statistics": float(held.norm_statistics),
            "crossing": between(self._crossings[0][index], self._crossings[1][index], at),
        }

    def ties(self) -> dict[tuple[int, ...], float]:
        """Return the number of entries of shared weights, by the indices of the units that share them."""
        holders: dict[int, list[int]] = {}
        values: dict[int, Tensor] = {}
        for index, held in enumerate(self._held):
            for key, value in held.parameters.items():
                holders.setdefault(key, []).append(index)
                values[key] = value
        entries: dict[tuple[int, ...], float] = {}
        for key, indices in holders.items():
            if len(indices) > 1:
                entries[tuple(indices)] = entries.get(tuple(indices), 0.0) + values[key].numel()
        return entries

    def parameters(self) -> tuple[tuple[str, int, str, bool, int], ...]:
        first: dict[int, int] = {}
        for index, held in enumerate(self._held):
            for key in held.parameters:
                first.setdefault(key, index)
        return tuple(
            (name, value.numel(), str(value.dtype).removeprefix("torch."), value.requires_grad, first[id(value)])
            for name, value in self._model.named_parameters()
        )


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Disable torch's logging of tracebacks on fake tensors within the context; they are reported in one line here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
