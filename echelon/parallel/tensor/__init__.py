"""Op split: modules whose weights are cut over the ranks of one axis, and the tensors that go between them."""

# imported because they register what can be computed on parts
from echelon.parallel.tensor import argmax, cross_entropy, reshape_rules  # noqa: F401
from echelon.parallel.tensor.sharded_activation import ShardedActivation, whole
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_model import AppliedSplit, apply_split, why_not

__all__ = [
    "AppliedSplit",
    "ShardedActivation",
    "SplitAxis",
    "apply_split",
    "choose",
    "loss",
    "shapes",
    "whole",
    "why_not",
]
