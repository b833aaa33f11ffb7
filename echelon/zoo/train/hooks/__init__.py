"""Hooks: actions of a run besides training, such as stopping, logging, timelines, checkpoints and evaluations."""

from echelon.zoo.train.hooks.hook import Hook, HookContext
from echelon.zoo.train.hooks.hooks import HOOKS, Hooks

__all__ = ["HOOKS", "Hook", "HookContext", "Hooks"]
