"""Sharded modules: classes whose forward unshards a unit before it, and whose parameters are unsharded when read.

Replacing a module's class keeps the module's identity, and works for its deep copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.parallel.zero.shard_unit import ShardUnit
from echelon.parallel.zero.zero3 import ParamGatherer
from echelon.plan.called_modules import why_fixed

Kind = type[nn.Module]
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)  # their backward does not need the weight


@dataclass
class _HookedModule:
    """A module whose forward and parameter access are intercepted.

    compiled: function that is called in place of its forward, with all of its parameters unsharded
    units:    units of all of its parameters, once they have been looked for
    """

    unit: ShardUnit | None
    whole_model: bool
    compiled: Callable[..., Any] | None = None
    units: list[ShardUnit] | None = None

    @property
    def runs(self) -> bool:
        return self.unit is not None or self.whole_model or self.compiled is not None


Posts = weakref.WeakKeyDictionary[nn.Module, _HookedModule]  # excludes deep copies, which have their own parameters


def visit_modules(model: nn.Module, units: Mapping[str, ShardUnit], visits: ParamGatherer) -> None:
    """Unshard units when their modules run, and parameters when they are read from their modules."""
    posts: Posts = weakref.WeakKeyDictionary()
    visited = functools.cache(functools.partial(_visited, posts=posts, visits=visits))  # equal blocks share a class
    for name, module in model.named_modules():
        unit = units.get(name)
        if unit is not None or not name or any(visits.brings(p) for p in module._parameters.values()):
            _refuse_fixed(name, module)
            posts[module] = _HookedModule(unit, whole_model=not name)
            module.__class__ = visited(type(module))  # type: ignore[arg-type]
        if unit is not None:
            unit.embedding_only = all(isinstance(owner, EMBEDDINGS) for owner in _owners(module, unit))


def _owners(module: nn.Module, unit: ShardUnit) -> Iterator[nn.Module]:
    inside = {id(parameter) for parameter in unit.parameters.values()}
    return (m for m in module.modules() if any(id(p) in inside for p in m._parameters.values()))


def _refuse_fixed(name: str, module: nn.Module) -> None:
    reason = why_fixed(name, module)
    if reason is not None:
        raise UsageError(f"sharding: {reason}, or use level 2")


_INNER = "_sharded_kind_and_posts"


def compile_inside(module: nn.Module, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace a sharded module's forward by a compiled one, which runs while all of its parameters are unsharded.

    Returns False if the module is not sharded. Gathers and the end of their use stay outside of the compiled code.
    """
    inner: tuple[Kind, Posts] | None = getattr(type(module), _INNER, None)
    post = inner[1].get(module) if inner is not None else None
    if inner is None or post is None:
        return False
    post.compiled = compile(functools.partial(inner[0].forward, module))
    return True


def _visited(kind: Kind, posts: Posts, visits: ParamGatherer) -> Kind:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if visits.is_prepared:
            return kind.forward(self, *args, **kwargs)
        post = posts.get(self)
        if post is None or not visits.active or not (post.runs or visits.is_outside):
            return kind.forward(self, *args, **kwargs)
        with visits.call(post.unit, post.whole_model) as call:
            if post.compiled is None:
                output = kind.forward(self, *args, **kwargs)
            else:
                if post.units is None:
                    post.units = visits.units_of(self)
                with visits.prepared(call, post.units):
                    output = post.compiled(*args, **kwargs)
            if post.unit is not None:
                visits.watch_output(call, post.unit, output)
            return output

    def __getattr__(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        if visits.is_prepared or not visits.active or not isinstance(value, nn.Parameter):
            return value
        return visits.lend(value)

    body: dict[str, Any] = {"__getattr__": __getattr__, _INNER: (kind, posts)}
    if kind.forward is not nn.Module.forward:
        body["forward"] = forward
    return type(f"Sharded{kind.__name__}", (kind,), body)
