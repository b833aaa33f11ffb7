"""Layers that know how to be spread over devices."""

from echelon.nn.moe import MoE, take_auxiliary_loss
from echelon.nn.sparse_embedding import SparseEmbedding

__all__ = ["MoE", "SparseEmbedding", "take_auxiliary_loss"]
