"""Persistence of a server's state: journal, snapshots, replicas, recovery, checkpoints."""
