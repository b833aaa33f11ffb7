"""Read the weights of ``--model_dir`` and ``--ckpt_file_name`` under the names of the zoo; check the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from echelon.base.errors import CheckpointError
from echelon.zoo.entry import Request
from echelon.zoo.train.restore.model_dir import named_file
from echelon.zoo.train.restore.weight_files import read_file

#: Part of a name in every layer of Hugging Face's BERT, and in no model of the zoo.
_FROM_HUGGING_FACE = ".attention.self.query.weight"


def read_weights(request: Request) -> dict[str, Tensor]:
    """Return the initial weights in host memory; every rank reads the file itself."""
    path = named_file(request, "ckpt_file_name", others=(".index.json",))
    weights = read_file(path)
    if not weights:
        raise CheckpointError(f"'{path}' holds no weights; give another --ckpt_file_name")
    borrowed = ":" in request["model_name"]  # a model of the library keeps the library's names
    if not borrowed and any(_FROM_HUGGING_FACE in name for name in weights):
        from echelon.zoo.models.bert_names import from_hugging_face

        return from_hugging_face(weights, request.get("num_heads"))
    return weights


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
