"""Translate the names of weights and sizes in Google's and Hugging Face's BERT checkpoints to those of ``bert``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import CheckpointError

HEAD_WIDTH = 64  #: the width of a head in every BERT that Google published

#: Names of modules; ``#`` stands for the number of a layer.
_MODULES = {
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.segments",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.#.attention.self.query": "layers.#.attention.q",
    "encoder.layer.#.attention.self.key": "layers.#.attention.k",
    "encoder.layer.#.attention.self.value": "layers.#.attention.v",
    "encoder.layer.#.attention.output.dense": "layers.#.attention.project",
    "encoder.layer.#.attention.output.LayerNorm": "layers.#.norm1",
    "encoder.layer.#.intermediate.dense": "layers.#.mlp.0",
    "encoder.layer.#.output.dense": "layers.#.mlp.2",
    "encoder.layer.#.output.LayerNorm": "layers.#.norm2",
    "pooler.dense": "pooler",
    "cls.predictions.transform.dense": "guess.transform",
    "cls.predictions.transform.LayerNorm": "guess.norm",
    "cls.predictions.decoder": "guess.words",
    "cls.predictions": "guess.words",  # older files have the bias of the decoder here
    "cls.seq_relationship": "next_sentence",
    "classifier": "head",
    "qa_outputs": "head",
}
_LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_UNTRAINED = ("embeddings.position_ids", "embeddings.token_type_ids")

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "layer_norm_eps",
}


def from_hugging_face(state: Mapping[str, Tensor], heads: int | None = None) -> dict[str, Tensor]:
    """Return the weights with the names of ``bert``, with query, key and value of each head next to each other.

    heads: number of heads per layer, which the weights do not determine; by default heads are 64 wide, as published
    """
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        bare = name.removeprefix("bert.")
        if bare not in _UNTRAINED:
            result[_ours(name, bare)] = value
    for name in [name for name in result if ".attention.q." in name]:
        _fuse(result, name, heads)
    if "guess.words.bias" in result:  # the weight is tied: many files have it only once
        result.setdefault("guess.words.weight", result["embeddings.words.weight"])
    return result


def sizes_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``bert`` from a config.json."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(
            f"the config's hidden_act is '{config['hidden_act']}', and bert has gelu; use another model"
        )
    return {ours: config[theirs] for theirs, ours in _SIZES.items() if theirs in config}


def _ours(name: str, bare: str) -> str:
    module, _, leaf = bare.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
    ours = _MODULES.get(re.sub(r"(?<=\.)\d+(?=\.)", "#", module))
    if ours is None or leaf not in _LEAVES:
        raise CheckpointError(f"'{name}' is no weight of a BERT; give a checkpoint of one, or another model")
    return f"{ours.replace('#', *numbers) if numbers else ours}.{_LEAVES[leaf]}"


def _fuse(found: dict[str, Tensor], query: str, heads: int | None) -> None:
    """Replace the projections of query, key and value by one projection of (heads, 3 * width) features."""
    names = [query.replace(".q.", f".{each}.") for each in "qkv"]
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(f"the checkpoint has a query but no '{missing[0]}'; is it complete?")
    parts = [found.pop(name) for name in names]
    hidden = parts[0].shape[0]
    if hidden % (heads or HEAD_WIDTH):
        given = f"{heads} heads" if heads else f"heads of {HEAD_WIDTH}"
        raise CheckpointError(f"attention of {hidden} features does not divide into {given}; say num_heads")
    count = heads or hidden // HEAD_WIDTH
    by_head = torch.stack([part.reshape(count, -1, *part.shape[1:]) for part in parts], 1)
    found[query.replace(".q.", ".qkv.")] = by_head.flatten(0, 2)
