"""Restore the initial weights of finetuning, from echelon's checkpoints and from files of other libraries."""

from echelon.zoo.train.restore.config_sizes import sizes
from echelon.zoo.train.restore.fit_weights import RestoreReport, restore
from echelon.zoo.train.restore.initial_weights import check_vocabulary, read_weights

__all__ = ["RestoreReport", "check_vocabulary", "read_weights", "restore", "sizes"]
