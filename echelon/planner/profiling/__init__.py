"""Profiling of a model: its training step is traced on fake tensors, unit by unit. Builders of well-known models."""
