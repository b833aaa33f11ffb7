"""Data parallelism: gradients, their all-reduce, batch norm, compression and LocalSGD."""
