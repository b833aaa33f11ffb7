"""Check that the vocabulary matches the weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from echelon.base.errors import CheckpointError
from echelon.zoo.entry import Request


def check_vocabulary(model: nn.Module, weights: Mapping[str, Tensor], request: Request) -> None:
    """Raise CheckpointError if the run's vocabulary and that of the weights differ in size; call before ``restore``."""
    entries = request.get("vocab_size")
    if entries is None:
        return
    for name, module in model.named_modules():
        found = weights.get(f"{name}.weight")
        if not isinstance(module, nn.Embedding) or module.num_embeddings != entries or found is None:
            continue
        if found.shape[0] != entries:
            raise CheckpointError(
                f"the vocabulary has {entries} entries, and the checkpoint's '{name}' {found.shape[0]} rows; give the "
                "vocabulary that the weights were trained with (--vocab_file_name)"
            )
