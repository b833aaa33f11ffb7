"""An engine's side of in-memory checkpoints: writing snapshots after steps, reading them after a fault."""
