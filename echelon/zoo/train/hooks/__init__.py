"""Hooks: what a run does besides training: stopping, lines, timelines, checkpoints, evaluations, and what users add."""

from echelon.zoo.train.hooks.hook import Hook, HookContext
from echelon.zoo.train.hooks.hook_names import HOOKS
from echelon.zoo.train.hooks.hooks import Hooks

__all__ = ["HOOKS", "Hook", "HookContext", "Hooks"]
