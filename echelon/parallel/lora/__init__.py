"""Low-rank adapters: layers, their targets, and their files in PEFT's format."""
