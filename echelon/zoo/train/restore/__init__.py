"""Restore: the weights that finetuning begins with, from our checkpoints and from the files of others."""

from echelon.zoo.train.restore.fit import Restored, restore
from echelon.zoo.train.restore.request import read_weights
from echelon.zoo.train.restore.sizes import sizes
from echelon.zoo.train.restore.vocabulary import check_vocabulary

__all__ = ["Restored", "check_vocabulary", "read_weights", "restore", "sizes"]
