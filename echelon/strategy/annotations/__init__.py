"""Annotations of a model's parts: marks as data, scopes around construction, slices of ranks."""
