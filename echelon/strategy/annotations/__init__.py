"""Annotations of modules: marks (plain data), scopes around module construction, and slices of ranks."""
