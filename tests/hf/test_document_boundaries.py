"""A model that must keep documents apart by position_ids has to look for them; a stand-in library is watched."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.hf.document_boundaries import DocumentBoundaryCheck

INSIDE = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
WITHOUT = {"position_ids": torch.arange(5)[None]}


class Pretrained(nn.Module):
    def __init__(self, use_cache: bool = False, looks: bool = True, attention: str = "sdpa") -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache, _attn_implementation=attention)
        self._looks = looks

    def forward(self, position_ids: torch.Tensor) -> None:
        if self._looks and not self.config.use_cache:
            sys.modules["transformers.masking_utils"].find_packed_sequence_indices(position_ids)


def find(position_ids: torch.Tensor) -> torch.Tensor | None:
    return (position_ids == 0).cumsum(1) if (position_ids[:, 1:] == 0).any() else None


@pytest.fixture(autouse=True)
def masks(monkeypatch: pytest.MonkeyPatch) -> Any:
    library: Any = ModuleType("transformers")
    masks: Any = ModuleType("transformers.masking_utils")
    library.PreTrainedModel, masks.find_packed_sequence_indices = Pretrained, find
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    return masks


def trained(model: nn.Module, *batches: dict[str, torch.Tensor]) -> None:
    check = DocumentBoundaryCheck(model)
    for batch in batches:
        check(batch)
        next(each for each in model.modules() if isinstance(each, Pretrained))(**batch)


def test_a_model_that_looks_passes_and_is_left_alone(masks: Any) -> None:
    trained(nn.Sequential(Pretrained()), WITHOUT, INSIDE, WITHOUT, INSIDE)
    assert masks.find_packed_sequence_indices is find


def test_rows_without_a_boundary_say_nothing() -> None:
    trained(Pretrained(looks=False), WITHOUT, WITHOUT)
    trained(Pretrained(looks=False, attention="flash_attention_2"), INSIDE, INSIDE)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Pretrained(use_cache=True), "Pretrained keeps a cache of keys, .* set model.config.use_cache = False"),
        (Pretrained(looks=False), "attention of Pretrained crosses documents, .* train with documents=False"),
    ],
)
def test_a_model_that_crosses_documents_is_an_error(model: nn.Module, line: str, masks: Any) -> None:
    with pytest.raises(UsageError, match=line):
        trained(model, WITHOUT, INSIDE, WITHOUT)
    assert masks.find_packed_sequence_indices is find
