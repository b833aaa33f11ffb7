"""The zoo: models, data sets and the ``echelon train`` command. ``echelon zoo list`` lists them."""

from typing import TYPE_CHECKING, Any

from echelon.zoo.entry import Data, Dataset, Model, Request, Setting
from echelon.zoo.registry import all_datasets, all_models, dataset, model

if TYPE_CHECKING:
    from echelon.zoo.application import Application

__all__ = ["Data", "Dataset", "Model", "Request", "Setting", "all_datasets", "all_models", "dataset", "load", "model"]


def load(name: str, **parameters: Any) -> "Application":
    """Build a model of the zoo with its loss, its recompute checkpoints, its data and its loader.

    name:       name of a model, see ``echelon zoo list``
    parameters: parameters of ``echelon train``: num_classes, image_size, dataset_name, dataset_dir, batch_size, ...

    >>> application = echelon.zoo.load("lenet", dataset_name="digits")
    """
    from echelon.zoo.application import load as load_application  # imported here because it imports this package

    return load_application(name, **parameters)
