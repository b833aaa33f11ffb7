"""Mark the model according to the parameters --stages, --split and --marks."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.base.errors import UsageError, nearest
from echelon.strategy.annotations.annotate import annotate, pipeline, replicate, split, stage
from echelon.zoo.entry import Model, Request

_MAKERS: dict[str, Any] = {"pipeline": pipeline, "replicate": replicate, "split": split, "stage": stage}


def mark(model: nn.Module, entry: Model, request: Request) -> None:
    """Annotate ``model`` with the stages and splits of the request."""
    marks = requested_marks(entry, request)
    if marks:
        annotate(model, marks)


def requested_marks(entry: Model, request: Request) -> dict[str, list[Any]]:
    """Return the marks of the request, by module name."""
    marks: dict[str, list[Any]] = {}
    for name, own in [*_split(entry, request["split"]), *_written(request["marks"])]:
        marks.setdefault(name, []).extend(own)
    stages = request["stages"]
    by_hand = any(type(each).__name__ == "Stage" for own in marks.values() for each in own)
    if stages > 1 or by_hand:
        if stages > 1 and by_hand:
            raise UsageError(f"--stages {stages} cuts by cost, and --marks names stages; give one of them")
        how = pipeline(request["micro_batches"], request["schedule"], stages=stages if stages > 1 else None)
        if not any(type(each).__name__ == "Pipeline" for each in marks.get("", [])):
            marks.setdefault("", []).append(how)
    return marks


def _split(entry: Model, requested: str | None) -> list[tuple[str, list[Any]]]:
    if requested is None or split_size(requested):
        return []
    if requested != "model":
        return [(pattern.strip(), [split()]) for pattern in requested.split(",")]
    if not entry.split:
        raise UsageError(f"--split model: {entry.name} advises no split; name modules: --split head")
    return [(name, list(own) if isinstance(own, list) else [own]) for name, own in entry.split.items()]


def split_size(requested: str | None) -> int | None:
    """Return the number of ranks in ``--split 2``, or None where it names modules."""
    return int(requested) if requested is not None and requested.isdigit() else None


def _written(marks: Any) -> list[tuple[str, list[Any]]]:
    """Parse ``layers.0-3=stage(0);head=split()``, or the equivalent mapping."""
    if marks is None:
        return []
    if isinstance(marks, str):
        parts = [part.partition("=") for part in marks.split(";") if part.strip()]
        marks = {name.strip(): text for name, _, text in parts}
    if not isinstance(marks, Mapping):
        raise UsageError(f"--marks {marks}: expected name=mark;name=mark, such as 'layers.0-5=stage(0);head=split()'")
    return [(name, [_mark(text) for text in (own if isinstance(own, list) else [own])]) for name, own in marks.items()]


def _mark(text: str) -> Any:
    """Parse ``stage(0)`` or ``split('row')``: a call of one of four functions with literals; no code is evaluated."""
    try:
        call = ast.parse(str(text).strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        values = [ast.literal_eval(value) for value in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise UsageError(f"'{text}' is no mark; write stage(0), split(), replicate() or pipeline(...)") from None
    if call.func.id not in _MAKERS:
        raise UsageError(f"there is no mark '{call.func.id}'{nearest(call.func.id, _MAKERS)}")
    try:
        return _MAKERS[call.func.id](*values, **named)
    except TypeError as error:
        raise UsageError(f"'{text}': {error}") from None
