"""Measuring this machine for the planner: ``echelon bench``."""
