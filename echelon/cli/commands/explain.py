"""``echelon explain``: build a strategy and a model from command-line arguments and describe their effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from echelon.base.errors import UsageError
from echelon.base.object_path import callable_at, user_code
from echelon.strategy.command_line import strategy_from

if TYPE_CHECKING:
    from torch import nn


def run_explain(words: Sequence[str], model: str | None, ranks: int, ranks_per_host: int | None) -> str:
    strategy = strategy_from(words)
    return strategy.explain(model_from(model) if model else None, ranks=ranks, ranks_per_host=ranks_per_host)


def model_from(place: str) -> nn.Module:
    """Return the model that ``package.module:callable`` or ``path/to/file.py:callable`` builds."""
    make = callable_at(place, "--model")
    with user_code("--model", place):
        model = make()
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UsageError(f"--model '{place}' gave {type(model).__name__}; it must return a torch.nn.Module")
    return model
