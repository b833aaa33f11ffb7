"""The zoo: models, data sets and the ``echelon train`` command. ``echelon zoo list`` shows what there is."""

from echelon.zoo.entry import Data, Dataset, Model, Request, Setting
from echelon.zoo.registry import all_datasets, all_models, dataset, model

__all__ = ["Data", "Dataset", "Model", "Request", "Setting", "all_datasets", "all_models", "dataset", "model"]
