"""Tensor parallelism: modules whose weights are split over the ranks of one axis, and the activations between them."""

# imported because they register rules for functions of sharded activations
from echelon.parallel.tensor import argmax, attention_rules, concat_rules, cross_entropy, reshape_rules
from echelon.parallel.tensor.lazy_activation import whole
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_model import AppliedSplit, apply_split, why_not

__all__ = [
    "AppliedSplit",
    "ShardedActivation",
    "SplitAxis",
    "apply_split",
    "argmax",
    "attention_rules",
    "concat_rules",
    "cross_entropy",
    "reshape_rules",
    "whole",
    "why_not",
]
