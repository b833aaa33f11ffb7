"""The engine's side of in-memory snapshots: writes them after steps and reads them after a failure."""
