"""What a plan costs: seconds and bytes, from a model's units, the machines, and a Draft."""
