"""A worker's side of parameter servers: lookups, gradients, sessions."""
