"""What a model is made of: its training step on placeholders, unit by unit; and well-known models to plan for."""
