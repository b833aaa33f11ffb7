"""Execution of a Plan on one rank: data, tensor and pipeline parallelism, sharding, activations, loss."""
