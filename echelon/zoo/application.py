"""A model of the zoo with its loss, its recompute checkpoints and its loader, for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

import echelon
from echelon.base.errors import UsageError
from echelon.data import Loader
from echelon.data.download import local
from echelon.zoo.datasets.tokens.packing import packing
from echelon.zoo.entry import Data, Request
from echelon.zoo.registry import all_datasets
from echelon.zoo.tasks import TASKS, loss_of
from echelon.zoo.train.input import loader_options, train_part
from echelon.zoo.train.optimizers import make_optimizer
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.strategies import plans
from echelon.zoo.train.train_arguments import STRATEGY_OPTIONS, TrainArguments

if TYPE_CHECKING:
    from echelon.engine.engine import Engine

#: task -> the data set that reads a folder if no ``dataset_name`` is given
READ_AS = {
    "classify_images": "image_folder",
    "masked_lm": "masked_lm",
    "language_model": "text",
    "translate": "pairs",
    "answer_span": "squad",
    "classify_text": "glue",
    "word_pairs": "word_pairs",
}


@dataclass(frozen=True)
class Application:
    """A model of the zoo, ready for ``echelon.distribute``.

    model:       the model, on the device of this process
    loss:        function of (output, target), a mean over examples
    checkpoints: names of the modules whose outputs recompute keeps, for ``Recompute(checkpoints=...)``
    metrics:     metrics by name, for ``engine.evaluate``
    data:        the data set; ``data.test`` is the input of ``engine.evaluate``
    request:     values of all parameters of ``echelon train``, by name
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    checkpoints: tuple[str, ...] | Literal["auto"]
    metrics: Mapping[str, Any]
    data: Data
    request: Request

    def loader(
        self, engine: Engine, *, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """Return the loader of this rank's share of the training data, made with ``engine.loader``.

        batch_size:   batch size of each replica; the model's default if neither it nor ``global_batch`` is given
        global_batch: batch size of all replicas together
        options:      options of ``engine.loader``, which override those that the data set sets
        """
        if batch_size is None and global_batch is None:
            batch_size = self.request["batch_size"]
        return train_loader(engine, self.request, self.data, batch_size, global_batch, **options)

    def optimizer(self) -> Optimizer:
        """Return the optimizer that the parameters of ``load`` select, with the model's defaults."""
        return make_optimizer(self.model, self.request)


def load(name: str, **parameters: Any) -> Application:
    """Build a model of the zoo with its data, after ``echelon.init()``.

    name:       name of a model, see ``echelon zoo list``, or timm:NAME, hf:NAME
    parameters: parameters of ``echelon train``: num_classes, image_size, dataset_name, dataset_dir, batch_size, ...
                Without dataset_dir and dataset_name the data is synthetic.
    """
    for given in parameters:
        if given in STRATEGY_OPTIONS:
            raise UsageError(f"load({given}=...): it belongs to the strategy; write distribute(strategy=Strategy(...))")
    resolved = resolve(TrainArguments(run=_words({"model_name": name, **parameters})))
    if resolved["dataset_dir"] and not resolved.is_user_set("dataset_name"):
        found = _read_as(resolved)
        resolved = resolve(TrainArguments(run=_words({"model_name": name, **parameters, "dataset_name": found})))
    resolved, data = open_data(resolved)
    model = resolved.model.build(resolved.request)
    let_arrive(model, data)
    return Application(
        model=model.to(echelon.device()),
        loss=loss_of(resolved.request.task, resolved["loss_name"], resolved.model.loss),
        checkpoints=resolved.model.recompute or "auto",
        metrics=TASKS[resolved.request.task].metrics,
        data=data,
        request=resolved.request,
    )


def open_data(resolved: TrainConfig) -> tuple[TrainConfig, Data]:
    """Open the data set, before the model is built, because the data determines the numbers of classes and words."""
    if "://" in (resolved["dataset_dir"] or ""):
        resolved = resolved.with_value("dataset_dir", str(local(resolved["dataset_dir"])))
    data = packing(resolved.dataset.open(resolved.request), resolved.request, echelon.device(), planned=plans(resolved))
    return resolved.with_data(data), data


def let_arrive(model: nn.Module, data: Data) -> None:
    """Register the data set's on-device transform on the model: images are copied as bytes and become floats there."""
    arrive = data.arrive
    if arrive is not None:
        model.register_forward_pre_hook(lambda module, inputs: arrive(inputs))


def train_loader(
    engine: Engine, request: Request, data: Data, batch_size: int | None, global_batch: int | None = None, **more: Any
) -> Loader:
    """Return the loader of the training part, with the input parameters of the request, overridden by ``more``."""
    options = loader_options(request, data, engine.world.place.local_world_size)
    sizes = {"batch_size": batch_size, "global_batch": global_batch}
    return engine.loader(train_part(request, data), **sizes, **{**options, **more})


def _words(parameters: Mapping[str, Any]) -> dict[str, str | bool]:
    return {name: value if value is True else str(value) for name, value in parameters.items() if value is not None}


def _read_as(resolved: TrainConfig) -> str:
    """Return the name of the data set that reads a folder whose format is not given."""
    able = resolved.model.tasks[resolved["task_type"]]
    result = next((READ_AS[task] for task in able if task in READ_AS), None)
    if result is None:
        fitting = [each.name for each in all_datasets().values() if not set(each.tasks).isdisjoint(able)]
        raise UsageError(
            f"load('{resolved.model.name}', dataset_dir=...): say how the folder is read, by dataset_name, one of "
            f"{', '.join(sorted(fitting))}"
        )
    return result
