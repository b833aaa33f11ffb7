"""Build the optimizer and its learning-rate schedule from the parameters of the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.optim import FTRL, LAMB, LARS, Schedule
from echelon.zoo.entry import Request

RMSPROP_EPSILON = 1.0  #: the value in TensorFlow's inception training


def make_optimizer(model: nn.Module, request: Request) -> Optimizer:
    return _MAKERS[request["optimizer"]](_groups(model, request["weight_decay"]), request)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: weights with decay; biases and norms, which have one dimension, without it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def _flat(groups: list[dict[str, Any]]) -> list[Any]:
    return [p for group in groups for p in group["params"] if p.ndim <= 1]


def _epsilon(request: Request, usual: float = 1e-8) -> float:
    return float(request.get("opt_epsilon", usual))


def _betas(request: Request) -> tuple[float, float]:
    return request["adam_beta1"], request["adam_beta2"]


def _fused() -> dict[str, Any]:
    return {"fused": True} if torch.cuda.is_available() else {}


def _adadelta(groups: Any, request: Request) -> Optimizer:
    return torch.optim.Adadelta(groups, lr=request["learning_rate"], rho=request["adadelta_rho"], eps=_epsilon(request))


def _adagrad(groups: Any, request: Request) -> Optimizer:
    return torch.optim.Adagrad(
        groups,
        lr=request["learning_rate"],
        initial_accumulator_value=request["adagrad_initial_accumulator_value"],
        eps=_epsilon(request),
    )


def _adam(groups: Any, request: Request) -> Optimizer:
    return torch.optim.Adam(
        groups, lr=request["learning_rate"], betas=_betas(request), eps=_epsilon(request), **_fused()
    )


def _adamw(groups: Any, request: Request) -> Optimizer:
    return torch.optim.AdamW(
        groups, lr=request["learning_rate"], betas=_betas(request), eps=_epsilon(request), **_fused()
    )


def _ftrl(groups: Any, request: Request) -> Optimizer:
    return FTRL(  # FTRL has l1 and l2 instead of weight decay
        [p for group in groups for p in group["params"]],
        lr=request["learning_rate"],
        lr_power=request["ftrl_learning_rate_power"],
        initial_accumulator=request["ftrl_initial_accumulator_value"],
        l1=request["ftrl_l1"],
        l2=request["ftrl_l2"],
    )


def _lamb(groups: Any, request: Request) -> Optimizer:
    return LAMB(
        groups,
        lr=request["learning_rate"],
        betas=_betas(request),
        eps=_epsilon(request, 1e-6),
        exclude=_flat(groups),
    )


def _lars(groups: Any, request: Request) -> Optimizer:
    return LARS(groups, lr=request["learning_rate"], momentum=request["momentum"], exclude=_flat(groups))


def _momentum(groups: Any, request: Request) -> Optimizer:
    return torch.optim.SGD(groups, lr=request["learning_rate"], momentum=request["momentum"], **_fused())


def _rmsprop(groups: Any, request: Request) -> Optimizer:
    return torch.optim.RMSprop(
        groups,
        lr=request["learning_rate"],
        alpha=request["rmsprop_decay"],
        momentum=request["rmsprop_momentum"],
        eps=_epsilon(request, RMSPROP_EPSILON),
    )


def _sgd(groups: Any, request: Request) -> Optimizer:
    return torch.optim.SGD(groups, lr=request["learning_rate"], **_fused())


_MAKERS: dict[str, Callable[[Any, Request], Optimizer]] = {
    "adadelta": _adadelta,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "ftrl": _ftrl,
    "lamb": _lamb,
    "lars": _lars,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
}


_NOT_YET = 10**12  #: number of steps until the loader gives the real one; no decay depends on it at step 0


def make_schedule(optimizer: Optimizer, request: Request) -> Schedule:
    """Return the schedule; ``stretch`` later sets the length of the run."""
    return Schedule(
        optimizer,
        decay=request.get("decay_scheme", request["learning_rate_decay_type"]),
        total_steps=_NOT_YET,
        decay_steps=_NOT_YET,
        decay_factor=request["learning_rate_decay_factor"],
        end_lr=request["end_learning_rate"],
        warmup_steps=request["warmup_steps"],
        warmup=request["warmup_scheme"],
    )


def stretch(schedule: Schedule, request: Request, total_steps: int | None, steps_per_epoch: int | None) -> None:
    """Fit the schedule to a run of ``total_steps``, of which an epoch has ``steps_per_epoch``."""
    if schedule.decay == "fixed":
        return
    if schedule.decay == "exponential":
        if steps_per_epoch is None:
            raise UsageError(
                "exponential decay counts epochs, and this data set's length is not known before it is read; give "
                "--num_sample_per_epoch, or --learning_rate_decay_type fixed"
            )
        schedule.decay_steps = max(round(request["num_epochs_per_decay"] * steps_per_epoch), 1)
        return
    if total_steps is None:
        raise UsageError(
            f"{schedule.decay} decay needs the number of steps, which is not known before the data is read; give "
            "--stop_at_step or --num_sample_per_epoch"
        )
    schedule.total_steps = schedule.decay_steps = total_steps
