"""Text for mesh coordinates and rank lists: ``stage 0, split 1 of 2``; ``ranks 0-7``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def place_in_words(at: Mapping[str, int], mesh: Mapping[str, int], stages: int) -> str:
    """Return text for mesh coordinates; it is empty if all ranks hold whole models.

    at:     indices along the axes of the mesh
    stages: number of pipeline stages
    """
    own = range(at["stage"], stages, mesh.get("stage", 1))
    staged = f"stage{'s' if len(own) > 1 else ''} {' and '.join(map(str, own))}" if mesh.get("stage", 1) > 1 else ""
    split = f"split {at['split']} of {mesh['split']}" if mesh.get("split", 1) > 1 else ""
    return ", ".join(word for word in (staged, split) if word)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return text for ranks, such as ``rank 3``, ``ranks 0 and 2``, ``ranks 0-7`` or ``ranks 0-6 by 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and all(b - a == step for a, b in itertools.pairwise(ranks)):
        return f"ranks {ranks[0]}-{ranks[-1]}{f' by {step}' if step > 1 else ''}"
    listed = [str(rank) for rank in ranks]
    if len(listed) > 6:
        return f"{len(listed)} ranks from {listed[0]} on"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"
