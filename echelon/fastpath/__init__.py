"""The fast path: compiled blocks, bf16, channels last, fused optimizers, CUDA graphs. On by itself where it is safe.

``look`` finds what model and device allow, ``decide`` chooses (a pure function) and writes it into the Plan, ``path``
does what the Plan says.
"""
