"""Measurements of this machine for the planner: ``echelon bench``."""
