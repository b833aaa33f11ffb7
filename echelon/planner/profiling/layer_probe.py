"""Probes of linear layers in a trial run: is the input a part of features, and where is the output taken apart?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from echelon.parallel.tensor import ShardedActivation
from echelon.parallel.tensor.fused_activation import cut_points, last_slice
from echelon.parallel.tensor.lazy_activation import LazyActivation

#: Most parts of a fused projection that a reshape may show: query, key and value.
MOST_PARTS = 4


class LayerProbe:
    """Notes about the layers of one trial run.

    order: names of the layers, in the order of their first calls
    fed:   names of layers whose first input was split along the features
    parts: widths of the parts into which the output of a layer is taken apart along its features
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.order: list[str] = []
        self.fed: set[str] = set()
        self._bounds: dict[str, set[int]] = {}

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        result = {}
        for name, bounds in self._bounds.items():
            result[name] = tuple(end - begin for begin, end in itertools.pairwise(sorted(bounds)))
        return {name: widths for name, widths in result.items() if len(widths) > 1}

    def attach(self, model: nn.Module) -> None:
        for name in self.layers:
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(self._noting_input(name), with_kwargs=True)
            layer.register_forward_hook(self._watching_output(name))

    def _noting_input(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if name not in self.order:
                self.order.append(name)
                x = next(iter((*args, *kwargs.values())), None)
                if isinstance(x, ShardedActivation) and x.along == x.dim() - 1:
                    self.fed.add(name)

        return note

    def _watching_output(self, name: str) -> Callable[..., Any]:
        def watch(_: nn.Module, args: Any, output: Any) -> Any:
            if type(output) is not ShardedActivation or output.along != output.dim() - 1:
                return None
            return ProbedActivation(output, lambda bounds: self._note_bounds(name, bounds, output.width()))

        return watch

    def _note_bounds(self, name: str, bounds: Sequence[int], width: int) -> None:
        self._bounds.setdefault(name, {0, width}).update(bounds)


class ProbedActivation(ShardedActivation):
    """The output of a layer, which reports where it is taken apart by code that thereby gathers it."""

    def __init__(self, output: ShardedActivation, report: Callable[[Sequence[int]], None]) -> None:
        super().__init__(output.local, output.along, output.sizes, output.axis, output.rows)
        self._report = report

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        x = args[0] if args else None
        if isinstance(x, ProbedActivation) and not isinstance(result, LazyActivation):
            x._report(_bounds(getattr(func, "__name__", ""), x, args[1:], kwargs or {}))
        return result


def _bounds(name: str, x: ShardedActivation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return where a call takes ``x`` apart along its last dimension; empty if it does not."""
    if name in ("split", "chunk", "split_with_sizes"):
        given = [*args, *kwargs.values()]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        along = isinstance(dim, int) and dim % x.dim() == x.along
        return cut_points(name, given[0], x.width()) if along and given else []
    if name == "__getitem__":
        return list(last_slice(args[0], x) or ())
    if name in ("view", "reshape"):
        wanted = list(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else list(args)
        inner = wanted[x.along :]
        if len(inner) > 2 and isinstance(inner[0], int) and 1 < inner[0] <= MOST_PARTS:
            return [at * x.width() // inner[0] for at in range(inner[0])]
    return []
