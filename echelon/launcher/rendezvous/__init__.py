"""Rendezvous of launchers: who takes part, in which order, and how each round ends."""
