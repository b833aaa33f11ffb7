"""Metrics of a run: timing of step phases, console output and metrics files."""

from echelon.observability.metrics.metrics_logger import MetricsLogger
from echelon.strategy.log_settings import Log

__all__ = ["Log", "MetricsLogger"]
