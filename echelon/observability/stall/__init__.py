"""Stall detection: where each rank is, which rank is late, and which ranks are slow."""
