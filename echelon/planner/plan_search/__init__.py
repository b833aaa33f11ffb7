"""The search for the fastest plan that fits in memory, and for its neighbors."""
