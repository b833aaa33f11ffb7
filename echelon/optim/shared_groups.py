"""Replace one optimizer by another that shares its ``param_groups``: the same list and the same dicts.

A scheduler on the user's optimizer, and user code that sets ``optimizer.param_groups[0]["lr"]``, therefore also change
the optimizer that steps.
"""

from __future__ import annotations

from typing import Any

import torch


class SharingOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``param_groups`` stay the same objects when its state is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        shared, groups = self.param_groups, list(self.param_groups)
        super().load_state_dict(state_dict)
        loaded, self.param_groups = self.param_groups, shared
        for group, fresh in zip(groups, loaded, strict=True):
            group.clear()
            group.update(fresh)


def share_groups(made: SharingOptimizer, source: torch.optim.Optimizer) -> None:
    """Make ``made`` use the parameter groups of ``source``."""
    made.param_groups = source.param_groups

    def stepped(*_: Any) -> None:
        source._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if their optimizer never steps

    made.register_step_post_hook(stepped)
