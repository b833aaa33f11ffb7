"""Expert parallelism: the experts of a mixture-of-experts layer are on different ranks."""
