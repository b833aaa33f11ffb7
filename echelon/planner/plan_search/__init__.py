"""Which plan is best, and what lies around it."""
