"""Optimizers and learning-rate schedules that torch lacks; all are torch classes and also work without the engine."""

from echelon.optim.exclusion import excluded_names
from echelon.optim.ftrl import FTRL
from echelon.optim.lamb import LAMB
from echelon.optim.lars import LARS
from echelon.optim.schedules import Schedule

__all__ = ["FTRL", "LAMB", "LARS", "Schedule", "excluded_names"]
