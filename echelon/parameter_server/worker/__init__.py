"""The worker side of parameter servers: lookups, gradients, sessions."""
