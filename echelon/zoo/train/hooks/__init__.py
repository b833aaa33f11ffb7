"""Hooks: what a run does besides training: stopping, lines, timelines, checkpoints, evaluations, and what users add."""

from echelon.zoo.train.hooks.hook import Hook, Run
from echelon.zoo.train.hooks.hooks import Hooks
from echelon.zoo.train.hooks.named import HOOKS

__all__ = ["HOOKS", "Hook", "Hooks", "Run"]
