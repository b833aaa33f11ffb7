"""Mark modules for parallelism, in scopes around construction or by name afterwards, and collect and check the marks.

with echelon.pipeline(micro_batches=4):
    with echelon.stage(): self.lower = Encoder(0, 12)
    with echelon.stage(): self.upper = Encoder(12, 24)
with echelon.split():
    self.head = torch.nn.Linear(1024, 32_000)

echelon.annotate(model, {"layers.0-11": stage(0), "layers.12-23": stage(1), "head": split(), "": pipeline()})
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from torch import nn

from echelon.base.config import strict
from echelon.base.errors import UsageError, nearest
from echelon.strategy.annotations.marks import How, Mark, NextStage, Pipeline, Replicate, ScheduleName, Split, Stage
from echelon.strategy.annotations.scopes import is_same, refuse_nesting, tag, tags

M = TypeVar("M", bound=nn.Module)

_RANGE = re.compile(r"(\d+)-(\d+)")


def replicate() -> Replicate:
    """Replicate this part on every device, each with its own batch; a scope, or a mark for ``annotate``.

    >>> echelon.annotate(model, {"head": echelon.split(), "encoder": echelon.replicate()})
    """
    return Replicate()


def split(
    how: How = "auto",
    *,
    gather: bool = True,
    sequence: bool = False,
    weights: Sequence[float] | None = None,
    parts: int | Sequence[int] | None = None,
) -> Split:
    """Shard the weights of this part over the devices of a slice (tensor parallelism); a scope or an ``annotate`` mark.

    how:      "column" shards the outputs of a Linear, "row" its inputs, "sequence" keeps weights whole and shards
              dimension 1 of the activations; "auto" (default) depends on the module: Linear by columns, Embedding over
              the vocabulary, Conv2d by output channels, attention by heads, a block as a whole
    gather:   True all-gathers the output (default); False passes on the local shard as a plain tensor
    sequence: True also shards the activations between the split layers of a block along dimension 1 (sequence
              parallelism); default False
    weights:  relative widths of the shards, [2, 1] if the first device is twice as fast; default equal widths
    parts:    of a Linear that computes several outputs at once: their number if they are equally wide (3 for query, key
              and value), or their widths; each of them is sharded by itself

    >>> with echelon.split():
    ...     self.head = torch.nn.Linear(1024, 32_000)
    >>> echelon.annotate(model, {"layers.*.up": echelon.split("column"), "layers.*.down": echelon.split("row")})
    """
    fused = parts if parts is None or isinstance(parts, int) else tuple(parts)
    return Split(how=how, gather=gather, sequence=sequence, weights=_tuple(weights), parts=fused)


def stage(index: int | None = None) -> Stage | NextStage:
    """Run this part in one stage of the pipeline; a scope inside ``pipeline()``, or a mark for ``annotate``.

    index: number of the stage, from 0; by default a scope takes the next number

    >>> echelon.annotate(model, {"layers.0-11": echelon.stage(0), "layers.12-23": echelon.stage(1)})
    """
    return NextStage() if index is None else Stage(index=index)


def pipeline(
    micro_batches: int = 4,
    schedule: ScheduleName = "1f1b",
    stages: int | None = None,
    weights: Sequence[float] | None = None,
    dynamic_shapes: bool = False,
) -> Pipeline:
    """Run the stages inside as a pipeline (pipeline parallelism); a scope around them, or the mark of the whole model.

    micro_batches:  number of micro-batches per batch, default 4; more of them make the bubble smaller
    schedule:       order of forward and backward passes: "1f1b" (default), "gpipe", "interleaved" or "zero-bubble"
    stages:         number of stages into which a model without ``stage()`` marks is partitioned by cost
    weights:        relative speeds of the stages' devices; a faster device gets a larger part of the model
    dynamic_shapes: True if micro-batches differ in more than their number of samples; default False

    >>> with echelon.pipeline(micro_batches=8):
    ...     with echelon.stage(): self.lower = Encoder(0, 12)
    ...     with echelon.stage(): self.upper = Encoder(12, 24)
    >>> echelon.annotate(model, {"": echelon.pipeline(stages=2)})
    """
    return Pipeline(
        micro_batches=micro_batches,
        schedule=schedule,
        stages=stages,
        weights=_tuple(weights),
        dynamic_shapes=dynamic_shapes,
    )


_default: Replicate | Split | None = None


def set_default(mark: Replicate | Split | None) -> None:
    """Set the mark of modules that have none; ``None`` restores the initial default, which is replicated.

    mark: ``replicate()``, ``split(...)`` or None

    >>> echelon.set_default(echelon.split())
    """
    global _default  # noqa: PLW0603 - one default for the process, as its name says
    if mark is not None and not isinstance(mark, Replicate | Split):
        raise UsageError(f"set_default({mark}): expected replicate(), split(...) or None")
    _default = mark


def annotate(model: M, marks: Mapping[str, Any] | Literal["tensor"], *, sample: Any = None) -> M:
    """Put marks on modules by name, and return the model.

    model:  torch module
    marks:  a mark or a list of marks by name: a module's full name (``""`` is the model itself), with ranges of numbers
            (``layers.0-11``) and patterns as in file names (``encoder.*.attn``). "tensor" finds the marks of tensor
            parallelism: from the tensor-parallel plan of a Hugging Face model, else from the structure of the layers
    sample: batch as in ``Engine.step``, with which "tensor" looks at the structure of a model without a plan; a
            Hugging Face model needs none

    >>> model = echelon.annotate(model, {"layers.*.up": echelon.split("column"), "head": echelon.split()})
    """
    if isinstance(marks, str):
        if marks != "tensor":
            raise UsageError(f"annotate: '{marks}' is no set of marks; expected 'tensor', or marks by name")
        from echelon.planner.apply.tensor_marks import annotate_tensor

        annotate_tensor(model, sample=sample)
        return model
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern, given in marks.items():
        for mark in given if isinstance(given, list | tuple) else [given]:
            _check_mark(pattern, mark)
            for name in _matching(pattern, modules):
                tag(modules[name], mark, name)
    return model


def _check_mark(pattern: str, mark: Any) -> None:
    if isinstance(mark, NextStage):
        raise UsageError(f"annotate: '{pattern}' has stage() without a number; by name, say which: stage(0)")
    if not isinstance(mark, Mark):
        raise UsageError(
            f"annotate: '{pattern}' has {mark!r}; expected replicate(), split(...), stage(i), pipeline(...) or a list"
        )


def _matching(pattern: str, names: Mapping[str, nn.Module]) -> list[str]:
    """Return the module names that ``pattern`` matches; raise UsageError if a number of a range has no module."""
    result = []
    for each in _expanded(pattern):
        matches = [each] if each in names else [name for name in names if fnmatchcase(name, each)]
        if not matches:
            raise UsageError(f"annotate: no module is called '{each}'{_nearest(each, names)}")
        result += matches
    return result


def _expanded(pattern: str) -> Iterator[str]:
    """Expand ranges: ``a.0-1.b`` gives ``a.0.b`` and ``a.1.b``."""
    choices = []
    for part in pattern.split("."):
        span = _RANGE.fullmatch(part)
        choices.append([str(i) for i in range(int(span[1]), int(span[2]) + 1)] if span else [part])
        if not choices[-1]:
            raise UsageError(f"annotate: the range {part} in '{pattern}' is empty; write the smaller number first")
    return map(".".join, itertools.product(*choices))


def _nearest(pattern: str, names: Mapping[str, nn.Module]) -> str:
    parent, _, own = pattern.rpartition(".")
    if own.isdigit() and f"{parent}.0" in names:
        count = sum(name.rpartition(".")[0] == parent for name in names)
        return f"; '{parent}' has 0 to {count - 1}"
    hint = nearest(pattern.rstrip(".*"), [name for name in names if name])
    if len(hint) < 200:
        return hint
    top = [name for name in names if name and "." not in name]
    return f"; the model has {', '.join(top[:12])}{', ...' if len(top) > 12 else ''}"


def _tuple(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if weights is None else tuple(weights)


@strict
class ModelMarks:
    """All marks of one model, checked. If equal marks are nested, the outermost one is kept.

    units:      stage number of each module marked with a stage
    splits:     mark of each split module
    replicates: names of modules that are marked as replicated
    pipeline:   the pipeline mark; the default ``Pipeline()`` if stages are marked without one
    default:    mark of all other modules; None means replicated
    """

    units: dict[str, int]
    splits: dict[str, Split]
    replicates: tuple[str, ...]
    pipeline: Pipeline | None
    default: Replicate | Split | None

    @property
    def stages(self) -> int:
        """The number of pipeline stages that are marked or requested; 1 without a pipeline."""
        if self.units:
            return max(self.units.values()) + 1
        return (self.pipeline.stages or 1) if self.pipeline else 1


def collect(model: nn.Module) -> ModelMarks:
    """Collect and check the marks on the modules of ``model``; a shared module counts once, under its first name."""
    result = list(_outermost(model, "", {}, set()))
    units = {name: mark.index for name, mark in result if isinstance(mark, Stage)}
    pipelines = {id(mark): (name, mark) for name, mark in result if isinstance(mark, Pipeline)}
    if len(pipelines) > 1:
        raise UsageError(
            f"there are {len(pipelines)} pipelines, at {_quoted(name for name, _ in pipelines.values())}: a model has "
            "one pipeline; open one around all stages"
        )
    chosen = next(iter(pipelines.values()))[1] if pipelines else Pipeline() if units else None
    _check_stages(units, chosen)
    return ModelMarks(
        units=units,
        splits={name: mark for name, mark in result if isinstance(mark, Split)},
        replicates=tuple(name for name, mark in result if isinstance(mark, Replicate)),
        pipeline=chosen,
        default=_default,
    )


def _outermost(
    module: nn.Module, name: str, around: dict[type[Any], tuple[str, Any]], seen: set[nn.Module]
) -> Iterator[tuple[str, Mark]]:
    """Yield every mark that no enclosing module has; ``around`` has the marks of enclosing modules and their names."""
    if module in seen:
        return
    seen.add(module)
    inside = dict(around)
    for mark in tags(module):
        if any(is_same(mark, other) for _, other in around.values()):
            continue
        for owner, other in around.values():
            refuse_nesting(other, mark, f"'{name}' ({mark}) is inside '{owner}' ({other})")
        inside[type(mark)] = (name, mark)
        yield name, mark
    for own, child in module.named_children():
        yield from _outermost(child, f"{name}.{own}" if name else own, inside, seen)


def _check_stages(units: dict[str, int], chosen: Pipeline | None) -> None:
    numbers = sorted(set(units.values()))
    gaps = sorted(set(range(numbers[-1] + 1)) - set(numbers)) if numbers else []
    if gaps:
        raise UsageError(
            f"stages {_listed(numbers)} are marked and {_listed(gaps)} is not: number stages from 0 without gaps"
        )
    if chosen is None:
        return
    if chosen.stages is not None and units:
        raise UsageError(
            f"{chosen} cuts the model by itself, but {len(numbers)} stages are marked; drop stages= or the stage marks"
        )
    if chosen.stages is None and not units:
        raise UsageError(f"{chosen} has no stages: mark modules with stage(), or say how many: pipeline(stages=2)")
    count = chosen.stages or len(numbers)
    if chosen.weights is not None and count and len(chosen.weights) != count:
        raise UsageError(f"{chosen} has {len(chosen.weights)} weights for {count} stages; give one for each stage")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _quoted(names: Iterator[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
