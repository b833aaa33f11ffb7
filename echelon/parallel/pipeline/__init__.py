"""Pipeline parallelism: stages on several ranks, which run micro-batches in the order of a schedule."""
