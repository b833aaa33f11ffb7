"""Rendezvous of launchers: which hosts take part, in which order, and how each round ends."""
