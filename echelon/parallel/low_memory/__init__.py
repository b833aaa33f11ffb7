"""Lean training: six bytes a parameter, on the device and beside it, in place of sixteen. See docs/large_models.md."""

from echelon.parallel.low_memory.building import building

__all__ = ["building"]
