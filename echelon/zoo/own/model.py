"""Make a user's model an entry of the zoo."""

from __future__ import annotations

from torch import nn

from echelon.base.errors import UsageError
from echelon.zoo.entry import OWN_RUNNER, Model, Request
from echelon.zoo.own.arguments import read_arguments
from echelon.zoo.own.loss import loss_of_class
from echelon.zoo.own.own_object import declared_tasks, found_at, short_name
from echelon.zoo.tasks import OWN


def own_model(place: str) -> Model:
    """Return the entry of ``file.py:Name``, which is a class or function that makes a module, or a ``zoo.Model``."""
    result = found_at(place, "--model_name")
    if isinstance(result, Model):
        return result
    arguments, loss = read_arguments(result, place), loss_of_class(result, place)
    tasks = declared_tasks(result, place, first=OWN if loss else "classify")

    def build(request: Request) -> nn.Module:
        network = arguments.call(request)
        if not isinstance(network, nn.Module):
            raise UsageError(f"--model_name {place}: gave {type(network).__name__}; it must make a torch.nn.Module")
        return network

    return Model(
        name=short_name(place),
        runner=OWN_RUNNER,
        build=build,
        tasks={"pretrain": tasks, "finetune": tasks},
        about=f"your own, of {place}",
        settings=arguments.settings,
        defaults=arguments.defaults,
        loss=loss,
    )
