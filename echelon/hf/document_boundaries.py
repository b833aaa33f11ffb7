"""``DocumentBoundaryCheck``: finds out whether a model of transformers keeps attention inside documents.

Most models find documents by ``position_ids`` that restart, unless they keep a cache of keys, which is their default;
others never look at them. Neither is an error there, and attention goes on into the next document.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from echelon.base.errors import UsageError


class DocumentBoundaryCheck:
    """Callback for each batch: after the first one with a boundary inside a row, the model must have looked for it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = _pretrained(model)
        self._masks = sys.modules.get("transformers.masking_utils")
        self._find: Any = None  # the library's function, while the check stands in for it
        self._has_seen = False

    def __call__(self, batch: Any) -> None:
        if self._find is not None:
            self._finish()
        elif self._model is not None and _has_boundary(batch):
            self._begin()

    def _begin(self) -> None:
        """Watch the forward pass of the batch that comes now."""
        self._find = getattr(self._masks, "find_packed_sequence_indices", None)
        if self._find is None or _is_varlen(self._model):
            self._model = None
            self._find = None
            return
        setattr(self._masks, "find_packed_sequence_indices", self._watched)  # noqa: B010

    def _watched(self, position_ids: Any) -> Any:
        found = self._find(position_ids)
        self._has_seen = self._has_seen or found is not None
        return found

    def _finish(self) -> None:
        setattr(self._masks, "find_packed_sequence_indices", self._find)  # noqa: B010
        model, self._model, self._find = self._model, None, None
        if self._has_seen:
            return
        name = type(model).__name__
        if getattr(getattr(model, "config", None), "use_cache", False):
            raise UsageError(
                f"documents=True: {name} keeps a cache of keys, with which its attention crosses documents; set "
                "model.config.use_cache = False"
            )
        raise UsageError(
            f"documents=True: attention of {name} crosses documents, since it does not find them by position_ids; "
            "train with documents=False, or with another model"
        )


def _has_boundary(batch: Any) -> bool:
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return isinstance(positions, Tensor) and bool((positions[:, 1:] == 0).any())


def _pretrained(model: nn.Module) -> nn.Module | None:
    """Return the model of transformers in a model; None if there is none."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return None if base is None else next((each for each in model.modules() if isinstance(each, base)), None)


def _is_varlen(model: nn.Module | None) -> bool:
    """Return True if attention takes the boundaries from ``position_ids`` itself, as flash attention does."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", "")).startswith("flash")
