"""Sparse tables whose rows lie in the memory of a device, with the same numbers as tables in host memory."""
