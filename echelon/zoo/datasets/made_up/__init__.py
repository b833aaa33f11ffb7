"""Synthetic data for every task, which a model can learn and which needs no download."""
