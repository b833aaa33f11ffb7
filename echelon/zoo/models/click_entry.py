"""Shared parts of models with sparse tables: settings, tables for any id, and networks by sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from echelon.base.errors import UsageError
from echelon.nn import SparseEmbedding
from echelon.parameter_server.protocol.job_spec import RowDtype
from echelon.strategy.sparse_update_rules import NAMED
from echelon.zoo.entry import Model, Request, Setting

ADVICE = (
    "parameter servers: 'echelon train --servers 1 --workers 2'. hybrid keeps the dense part exact and lets rows never "
    "wait; sync gives the numbers of one process"
)

Rule = Literal["sgd", "momentum", "adagrad", "row_adagrad", "adam", "ftrl"]


def table_settings(dim: int, rate: float) -> tuple[Setting, ...]:
    """Return the settings of a model with embedding vectors for ids."""
    return (
        Setting(name="embedding_dim", default=dim, meaning="numbers in the vector of an id"),
        Setting(name="embedding_optimizer", default="adagrad", meaning="the rule that moves vectors", kind=Rule),
        Setting(name="embedding_learning_rate", default=rate, meaning="of that rule"),
        Setting(
            name="embedding_dtype", default="float32", meaning="the format that vectors are kept in", kind=RowDtype
        ),
    )


def table(request: Request, dim: int | None = None, **options: Any) -> SparseEmbedding:
    """Return a table that grows with the ids of the training data, with the update rule and rate of the settings."""
    rate = request["embedding_learning_rate"]
    if not rate > 0:
        raise UsageError(f"--embedding_learning_rate {rate}: must be above 0")
    rule = dataclasses.replace(NAMED[request["embedding_optimizer"]], lr=float(rate))
    dim = request["embedding_dim"] if dim is None else dim
    return SparseEmbedding(dim, optimizer=rule, dtype=request.get("embedding_dtype", "float32"), **options)


#: Columns of the models of single clicks.
ID_AND_NUMBER_COLUMNS = (
    Setting(name="slots", default=26, meaning="columns of ids; the data set's own number"),
    Setting(name="numbers", default=13, meaning="columns of numbers; the data set's own number"),
)


def click_model(
    name: str,
    build: Callable[[Request], nn.Module],
    *,
    settings: tuple[Setting, ...],
    task: str = "click",
    columns: tuple[Setting, ...] = ID_AND_NUMBER_COLUMNS,
    **entry: Any,
) -> Model:
    """Return the entry of a model of clicks with sparse tables, whose data determines the ``columns``."""
    return Model(
        name=name,
        runner="ctr",
        build=build,
        tasks={"pretrain": (task,), "finetune": (task,)},
        settings=columns + settings,
        strategy={"ps": "hybrid"},
        advice=ADVICE,
        **entry,
    )


def click_defaults(**others: Any) -> Mapping[str, Any]:
    """Return defaults with a constant learning rate and no weight decay, because most ids occur rarely."""
    return {
        "batch_size": 512,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "learning_rate_decay_type": "fixed",
        "weight_decay": 0.0,
        **others,
    }


def need_columns(request: Request, *names: str) -> None:
    """Raise UsageError if the data has no columns of a kind that the model needs."""
    for name in names:
        if request[name] < 1:
            raise UsageError(
                f"{request['model_name']} needs at least one column of {'ids' if name == 'slots' else 'numbers'}, and "
                f"{name} is {request[name]}; name such columns of the data, or take another model"
            )


def sizes(request: Request, name: str) -> list[int]:
    """Return the widths of layers, given as '256,128'; an empty text means no layer."""
    text = str(request[name])
    try:
        result = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        result = [0]
    if any(size < 1 for size in result):
        raise UsageError(f"--{name} '{text}': expected the sizes of layers, such as '256,128'")
    return result


def network(inputs: int, widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers, each followed by a ReLU and, if ``dropout`` is not 0, by dropout."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        inputs = width
    return nn.Sequential(*layers)
