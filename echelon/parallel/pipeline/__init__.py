"""A pipeline: stages on several ranks, micro-batches through them, as a schedule says."""
