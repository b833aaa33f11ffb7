"""Selection of the modules to recompute in backward, by name. Pure: no device, no process group.

A segment is a tuple of names of modules that run one after another and are recomputed together; only the input of a
segment is kept. Chains are long ``nn.Sequential`` modules without repeated blocks. The cuts of a chain depend on the
bytes that each child saves, which are known only with a batch: ``find_chains`` names the chains, and ``cut_chain`` cuts
them later.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from echelon.base.errors import UsageError, nearest
from echelon.plan.called_modules import is_called

Segments = tuple[tuple[str, ...], ...]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LONG = 4  # smallest number of children of a chain that is cut: two segments of two


def find_segments(model: nn.Module, checkpoints: Literal["auto"] | tuple[str, ...]) -> Segments:
    """Return the segments for the named modules (or patterns), or for every repeated block.

    A named child of an ``nn.Sequential`` is a point whose output is kept: its segment has all children since the
    previous point. A named module anywhere else is a segment of its own. Of nested names, only the outer one counts.
    Raises ``UsageError`` if nothing is found.
    """
    if checkpoints != "auto":
        return tuple(_between_points(model, "", _matched(model, checkpoints)))
    blocks = tuple((name,) for name in _blocks(model, ""))
    if not blocks and not _chains(model, ""):
        raise UsageError(
            "recompute found neither repeated blocks nor a long nn.Sequential in the model; name the modules to "
            f"recompute: Recompute(checkpoints=({_example(model)!r}, ...))"
        )
    return blocks


def find_chains(model: nn.Module) -> tuple[str, ...]:
    """Return the chains to cut by the bytes that their children save; none if the model has repeated blocks."""
    return () if any(_blocks(model, "")) else tuple(_chains(model, ""))


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that are repeated within a container."""
    return list(_blocks(model, ""))


def cut_chain(kept: Sequence[int], in_place: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Cut a chain into about sqrt(n) segments ``(first, end)`` whose largest is as small as possible.

    No segment begins with a child that changes its input in place, because the input could not be kept. Such children
    at the beginning of the chain belong to no segment.

    kept:     bytes that each child saves for backward
    in_place: True for each child that changes its input in place
    """
    starts = [i for i, changes_input in enumerate(in_place) if not changes_input]
    if not starts:
        return ()
    ends = [*starts[1:], len(kept)]
    sums = [sum(kept[start:end]) for start, end in zip(starts, ends, strict=True)]
    cuts = balance(sums, min(round(math.sqrt(len(kept))), len(sums)))
    return tuple((starts[first], ends[end - 1]) for first, end in cuts)


def balance(weights: Sequence[int], parts: int) -> tuple[tuple[int, int], ...]:
    """Divide ``weights`` into ``parts`` contiguous, non-empty ranges ``(first, end)`` with the smallest maximal sum."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(weights, middle, 1)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill(weights, low, parts)


def _fill(weights: Sequence[int], limit: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return ranges that are as long as ``limit`` allows, but short enough to make at least ``parts`` ranges."""
    cuts: list[tuple[int, int]] = []
    first = total = 0
    for i, weight in enumerate(weights):
        remaining_parts = parts - len(cuts) - 1
        if i > first and (total + weight > limit or len(weights) - i <= remaining_parts):
            cuts.append((first, i))
            first, total = i, 0
        total += weight
    return (*cuts, (first, len(weights)))


def is_chain(module: nn.Module) -> bool:
    """Return True if the module does nothing but run its children one after another."""
    return isinstance(module, nn.Sequential) and inspect.unwrap(type(module).forward) is nn.Sequential.forward


# ---- named points ----


def _matched(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    result: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise UsageError(f"recompute: no module is called '{pattern}'{_nearest(pattern, list(names))}")
        running = {name for name in matches if is_called(names[name])}
        if not running:
            kind = type(names[min(matches)]).__name__
            raise UsageError(f"recompute: '{pattern}' is a {kind}, which only holds modules; name '{pattern}.*'")
        result |= running
    return result


def _nearest(pattern: str, names: list[str]) -> str:
    hint = nearest(pattern.rstrip(".*"), names)
    if len(names) > 8 and "did you mean" not in hint:
        return f"; there are {', '.join(names[:7])}, ... ({len(names)} in all)"
    return hint


def _between_points(module: nn.Module, prefix: str, points: set[str]) -> Iterator[tuple[str, ...]]:
    waiting: list[tuple[str, nn.Module]] = []
    for name, child in _children(module, prefix):
        waiting.append((name, child))
        if name in points:
            yield tuple(name for name, _ in waiting) if is_chain(module) else (name,)
            waiting.clear()
        elif not is_chain(module):
            yield from _between_points(child, f"{name}.", points)
            waiting.clear()
    for name, child in waiting:  # after a chain's last point
        yield from _between_points(child, f"{name}.", points)


# ---- repeated blocks and chains ----


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of the outermost modules that are repeated within a container.

    If the repeated modules are containers of blocks, the blocks are yielded instead.
    """
    children = list(_children(module, prefix))
    repeated = Counter(_kind(child) for _, child in children if any(child.children()))
    for name, child in children:
        inner = list(_blocks(child, f"{name}."))
        is_stage = isinstance(child, CONTAINERS) and bool(inner)
        if isinstance(module, CONTAINERS) and repeated[_kind(child)] > 1 and is_called(child) and not is_stage:
            yield name
        else:
            yield from inner


def _kind(module: nn.Module) -> object:
    """Return a key that is equal for modules of one class; containers must also hold children of equal kinds."""
    if isinstance(module, CONTAINERS):
        return type(module), tuple(_kind(child) for child in module.children())
    return type(module)


def _chains(module: nn.Module, prefix: str) -> list[str]:
    """Return the names of the outermost long chains."""
    if is_chain(module) and len(module._modules) >= LONG:
        return [prefix.removesuffix(".")]
    return [chain for name, child in _children(module, prefix) for chain in _chains(child, f"{name}.")]


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # named_children() would leave out the second use of a shared child, such as a ReLU in a Sequential.
    return ((f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None)


def _example(model: nn.Module) -> str:
    return next((name for name, _ in model.named_children()), "layer")
