"""One optimizer in place of another: both have the same ``param_groups``, list and dicts.

A scheduler on the one that was given, and user code that sets ``optimizer.param_groups[0]["lr"]``, drive the one that
steps.
"""

from __future__ import annotations

from typing import Any

import torch


class SharingOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups stay the same objects when its state is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        shared, groups = self.param_groups, list(self.param_groups)
        super().load_state_dict(state_dict)
        loaded, self.param_groups = self.param_groups, shared
        for group, fresh in zip(groups, loaded, strict=True):
            group.clear()
            group.update(fresh)


def share_groups(made: SharingOptimizer, source: torch.optim.Optimizer) -> None:
    """From now on ``made`` steps with what is set on ``source``."""
    made.param_groups = source.param_groups

    def stepped(*_: Any) -> None:
        source._opt_called = True  # type: ignore[attr-defined]  # schedulers warn when their optimizer never steps

    made.register_step_post_hook(stepped)
