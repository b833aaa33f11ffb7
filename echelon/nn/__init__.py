"""Layers that know how to be spread over devices."""

from echelon.nn.gather_batch import gather_batch
from echelon.nn.moe import MoE, take_auxiliary_loss
from echelon.nn.packed import Bounds, Packed, mean_over_samples, pack
from echelon.nn.packed_attention import packed_attention
from echelon.nn.sparse_embedding import SparseEmbedding

__all__ = [
    "Bounds",
    "MoE",
    "Packed",
    "SparseEmbedding",
    "gather_batch",
    "mean_over_samples",
    "pack",
    "packed_attention",
    "take_auxiliary_loss",
]
