"""Low-memory training: six bytes per parameter, on device and host together, instead of sixteen."""

from echelon.parallel.low_memory.building import building

__all__ = ["building"]
