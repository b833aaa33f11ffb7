"""The fast path: compiled blocks, bf16, channels last, fused optimizers, CUDA graphs; on by default where it is safe.

``inspect`` finds what model and device allow, ``policy.decide`` (a pure function) chooses the parts, which are stored
in the Plan, and ``fast_path`` applies them.
"""
