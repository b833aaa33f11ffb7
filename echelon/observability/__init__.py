"""Observability of a run: metrics, run logs, traces and stall detection."""
