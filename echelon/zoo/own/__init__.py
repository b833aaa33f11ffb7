"""User-defined models, data sets and losses in ``echelon train``: ``file.py:Name`` or ``package.module:Name``."""

from echelon.zoo.own.dataset import own_dataset
from echelon.zoo.own.loss import own_loss
from echelon.zoo.own.model import own_model

__all__ = ["own_dataset", "own_loss", "own_model"]
