"""Seeing what happens: where the step's time goes, the console, and the metrics files."""

from echelon.observability.metrics.metrics_logger import MetricsLogger
from echelon.strategy.log_settings import Log

__all__ = ["Log", "MetricsLogger"]
