"""Stall detection: reports the state of each rank, and finds late and slow ranks."""
