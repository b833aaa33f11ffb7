"""Layers that know how to be spread over devices."""

from echelon.nn.moe import MoE, take_auxiliary_loss

__all__ = ["MoE", "take_auxiliary_loss"]
