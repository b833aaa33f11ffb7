"""Plan: how one model is spread over the devices of one job. Frozen, JSON, and comparable between ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from echelon.errors import UsageError
from echelon.strict import strict


@strict
class Parameter:
    """One parameter as every rank must have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    sparse: bool = False


@strict
class Bucket:
    """Parameters whose gradients travel together, in the order in which backward is expected to finish them."""

    optimizer: str
    parameters: tuple[str, ...]
    sparse: bool = False


@strict
class Plan:
    """What every rank does. Two ranks with equal hashes run the same collectives in the same order."""

    mesh: dict[str, int]
    model: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    communicators: int = 1
    reduce_op: str = "mean"
    wire: str | None = None
    gradient_merge: int = 1
    clip: float | None = None
    amp: str | None = None
    sync_batch_norm: tuple[str, ...] = ()
    version: int = 1

    @property
    def ranks(self) -> int:
        """Devices the plan needs: the product of the mesh's axes."""
        product = 1
        for size in self.mesh.values():
            product *= size
        return product

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["model"] = tuple(Parameter(**_tuples(item)) for item in fields["model"])
            fields["buckets"] = tuple(Bucket(**_tuples(item)) for item in fields["buckets"])
            return cls(**_tuples(fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"this is not a plan: {error}; write one with Plan.to_json()") from None

    def describe(self) -> str:
        """The plan in a few lines for people."""
        trained = [p for p in self.model if p.trainable]
        count = sum(_numel(p.shape) for p in self.model)
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"mesh: {axes} ({_count(self.ranks, 'rank')})",
            f"model: {count:,} parameters in {len(self.model)} tensors, {len(trained)} of them trained",
        ]
        if self.ranks > 1:
            wire = f", {self.wire} on the wire (inexact)" if self.wire else ""
            lines.append(
                f"gradients: {self.reduce_op} over replicas, {_count(len(self.buckets), 'bucket')} on "
                f"{_count(self.communicators, 'communicator')}{wire}"
            )
        for name in ("gradient_merge", "clip", "amp"):
            value = getattr(self, name)
            if value not in (None, 1):
                lines.append(f"{name.replace('_', ' ')}: {value}")
        if self.sync_batch_norm:
            lines.append(f"batch norm: {len(self.sync_batch_norm)} layers with statistics over all replicas")
        return "\n".join(lines)


def first_difference(mine: Any, theirs: Any, path: str = "plan") -> str | None:
    """Where two plans (as JSON values) part, in words: ``model[3] fc.weight shape: [10, 64] against [10, 32]``."""
    if type(mine) is type(theirs) and isinstance(mine, dict):
        for key in sorted(mine.keys() | theirs.keys()):
            label = mine.get("name", "") if isinstance(mine.get("name"), str) else ""
            if key not in mine or key not in theirs:
                return f"{path}.{key} is there on one side only"
            found = first_difference(mine[key], theirs[key], f"{path} {label} {key}".replace("  ", " "))
            if found:
                return found
        return None
    if isinstance(mine, list) and isinstance(theirs, list):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if isinstance(a, dict | list) and (found := first_difference(a, b, f"{path}[{i}]")):
                return found
        if mine != theirs and _flat(mine) and _flat(theirs):
            return f"{path}: {mine} against {theirs}"
        return None if len(mine) == len(theirs) else f"{path}: {len(mine)} entries against {len(theirs)}"
    return None if mine == theirs else f"{path}: {mine!r} against {theirs!r}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _flat(items: list[Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in items)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
