"""Disables the key-value caches that decoders of the transformers library fill by default.

A recomputed layer would fill its cache twice. Training does not read the caches, so they are off until the engine
closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from echelon.plan import Plan


class CacheSwitch:
    """The configurations of one model whose ``use_cache`` is off while it trains with recomputation."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        reason = _reason(model, plan)
        self._off = switch_off(model) if reason else []
        said = f"{reason}: config.use_cache is off while training; a layer that runs twice would fill its cache twice"
        self.notices = [said] if self._off else []

    def restore(self) -> None:
        for config in self._off:
            config.use_cache = True
        self._off = []


def switch_off(model: nn.Module) -> list[Any]:
    """Set ``use_cache`` to False in all configurations of the model's modules; return those that were changed."""
    changed = [config for config in _configs(model) if getattr(config, "use_cache", None) is True]
    for config in changed:
        config.use_cache = False
    return changed


def _reason(model: nn.Module, plan: Plan) -> str | None:
    if plan.recompute or plan.recompute_chains:
        return "recompute"
    own = any(getattr(module, "gradient_checkpointing", None) is True for module in model.modules())
    return "gradient checkpointing" if own else None


def _configs(model: nn.Module) -> Iterator[Any]:
    """Return each config of the model's modules once; parts of a model may have copies, as T5's decoder does."""
    result = (module.__dict__.get("config") for module in model.modules())
    return iter({id(config): config for config in result if config is not None}.values())
