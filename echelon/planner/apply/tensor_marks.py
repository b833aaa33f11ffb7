"""Marks for tensor parallelism that are found: from the model's tensor-parallel plan, else from its structure.

Marks decide what is saved, never what is computed: a split layer's output looks whole, so any set of marks is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.parallel.tensor import why_not
from echelon.planner.apply.tp_plan import read_plan
from echelon.strategy.annotations.annotate import annotate
from echelon.strategy.annotations.marks import Split

#: Attributes by which modules of attention say how wide a head is.
HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class TensorMarks:
    """Marks of the modules to split.

    origin: source of the marks
    marks:  marks by module
    whole:  modules that stay whole although the source names them, and the reason
    """

    origin: str
    marks: Mapping[str, Split]
    whole: Mapping[str, str] = field(default_factory=dict)

    def line(self, size: int | None = None) -> str:
        """Return a log line about the marks; ``size``: number of ranks that share each layer."""
        layers = "; ".join(_groups(self.marks))
        over = f" over {size} ranks" if size else ""
        kept = "".join(f"; {name} stays whole: {reason}" for name, reason in _kinds_with(self.whole))
        return f"split{over} by {self.origin}: {things(len(self.marks), 'module')} ({layers}){kept}"


def annotate_tensor(model: nn.Module, size: int | None = None, sample: Any = None, loss: Any = None) -> TensorMarks:
    """Put the marks of tensor parallelism on the model, and return them.

    size:   number of ranks that share each layer; layers whose heads do not divide by it stay whole. None: unknown yet
    sample: batch as in ``Engine.step``, for a model without a plan whose inputs are not known otherwise
    loss:   loss as in ``distribute``
    """
    found = _found(model, size, sample, loss)
    annotate(model, found.marks)
    return found


def _found(model: nn.Module, size: int | None, sample: Any, loss: Any) -> TensorMarks:
    planned = read_plan(model)
    if planned is None:
        from echelon.planner.apply.tensor_structure import marks_by_structure

        marks, origin, whole = marks_by_structure(model, size or 2, sample, loss), "the structure of its layers", {}
    else:
        marks, origin = planned.marks, planned.origin
        whole = {name: f"style '{style}' has no mark" for name, style in planned.unknown.items()}
    found = _without_tied(model, _without_odd_heads(model, size, _possible(model, TensorMarks(origin, marks, whole))))
    if not found.marks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in _kinds_with(found.whole))
        raise UsageError(
            f"split: {type(model).__name__} has no layers to split by {found.origin}"
            f"{f' ({reasons})' if reasons else ''}; mark layers by name: "
            "echelon.annotate(model, {'layers.*.up': split('column'), 'layers.*.down': split('row')})"
        )
    return found


def _leave(found: TensorMarks, reasons: Mapping[str, str]) -> TensorMarks:
    marks = {name: mark for name, mark in found.marks.items() if name not in reasons}
    return replace(found, marks=marks, whole={**found.whole, **reasons})


def _possible(model: nn.Module, found: TensorMarks) -> TensorMarks:
    """Leave out the modules that cannot be split."""
    tried = {name: why_not(model.get_submodule(name), mark) for name, mark in found.marks.items()}
    return _leave(found, {name: reason for name, reason in tried.items() if reason is not None})


def _without_tied(model: nn.Module, found: TensorMarks) -> TensorMarks:
    """Leave out the modules that share a weight with one that is not split, or is split along another dimension."""
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    reasons: dict[str, str] = {}
    for names in owners.values():
        other = next((name for name in names if name not in found.marks), None)
        if len(names) > 1 and other is not None:
            reasons |= {name: f"its weight is also that of {other}" for name in names if name in found.marks}
    return _leave(found, reasons)


def _without_odd_heads(model: nn.Module, size: int | None, found: TensorMarks) -> TensorMarks:
    """Leave out projections whose heads the ranks cannot share evenly.

    Keys and values with fewer heads than there are ranks are computed whole on every rank, and each rank takes those of
    its queries. If the queries cannot be shared, the whole attention stays whole.
    """
    reasons: dict[str, str] = {}
    for parent, names in _siblings(found.marks).items():
        width = next(filter(None, (_head_width(model.get_submodule(parent), each) for each in HEAD_WIDTHS)), None)
        heads = {name: _outputs(model.get_submodule(name)) // width for name in names if width}
        columns = {name: count for name, count in heads.items() if count and found.marks[name].how == "column"}
        if size is None or not columns:
            continue
        odd = {name: count for name, count in columns.items() if count % size}
        if odd and max(odd.values()) == max(columns.values()):
            reasons |= dict.fromkeys(names, f"{max(odd.values())} heads are not shared by {size} ranks")
        else:
            reasons |= {name: f"{count} key heads for {size} ranks" for name, count in odd.items()}
    return _leave(found, reasons)


def _siblings(marks: Mapping[str, Split]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in marks:
        parent = name.removesuffix(".base_layer").rpartition(".")[0]
        result.setdefault(parent, []).append(name)
    return result


def _head_width(module: nn.Module, attribute: str) -> int | None:
    width = getattr(module, attribute, None)
    return width if isinstance(width, int) and width > 0 else None


def _outputs(module: nn.Module) -> int:
    return getattr(module, "out_features", None) or getattr(module, "nf", None) or 0


def _groups(marks: Mapping[str, Split]) -> Iterator[str]:
    """Yield the last names of the marked modules, one text for each way to split them."""
    ways = {"auto": "", "column": " by columns", "row": " by rows", "sequence": " by positions"}
    for how, way in ways.items():
        names = [name.removesuffix(".base_layer").rpartition(".")[2] for name in marks if marks[name].how == how]
        if names:
            yield f"{', '.join(dict.fromkeys(names))}{way}"


def _kinds_with(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return _once(reasons.items())


def _once(items: Any) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, value in items:
        kind = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        if (kind, value) not in seen:
            seen.add((kind, value))
            yield kind, value
