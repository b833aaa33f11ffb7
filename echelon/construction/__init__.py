"""Models built without memory for their weights: construction is recorded, and each rank makes only its parts."""
