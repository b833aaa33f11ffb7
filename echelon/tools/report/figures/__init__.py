"""Figures as geometry, computed from data alone; the templates only write the coordinates."""
