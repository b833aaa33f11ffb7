"""Field names of plans and drafts in files that an earlier version wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMER_FIELDS = {
    "lean": "low_memory",
    "wire": "comm_dtype",
    "spread": "batch_per_split_rank",
    "chains": "recompute_chains",
    "undecayed": "no_weight_decay",
    "places": "stages",
}


def rename_former_fields(given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Replace former field names by the present ones; ``label`` is unused."""
    return {FORMER_FIELDS.get(name, name): value for name, value in given.items()}
