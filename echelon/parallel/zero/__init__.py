"""Sharding over replicas (ZeRO 1, 2, 3), with offload: each replica holds and updates a shard of every parameter."""

from echelon.parallel.zero.shards import Shards

__all__ = ["Shards"]
