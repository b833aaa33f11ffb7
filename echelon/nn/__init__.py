"""Layers and functions for models: mixture of experts, packed sequences, sparse embeddings."""

from typing import TYPE_CHECKING

from echelon.base.late_import import late_import
from echelon.nn.moe import MoE, take_auxiliary_loss
from echelon.nn.packed import Bounds, Packed, mean_over_samples, pack
from echelon.nn.packed_attention import packed_attention

if TYPE_CHECKING:
    from echelon.parallel.data.gather_batch import gather_batch
    from echelon.parameter_server.worker.sparse_embedding import SparseEmbedding
    from echelon.strategy.show_click_score import ShowClickScore

__all__ = [
    "Bounds",
    "MoE",
    "Packed",
    "ShowClickScore",
    "SparseEmbedding",
    "gather_batch",
    "mean_over_samples",
    "pack",
    "packed_attention",
    "take_auxiliary_loss",
]

#: Public names of this package whose modules are in higher layers; they are imported on first access.
__getattr__ = late_import(
    __name__,
    {
        "ShowClickScore": "echelon.strategy.show_click_score",
        "SparseEmbedding": "echelon.parameter_server.worker.sparse_embedding",
        "gather_batch": "echelon.parallel.data.gather_batch",
    },
)
