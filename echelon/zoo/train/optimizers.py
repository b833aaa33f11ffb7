"""Build an optimizer by name, with the parameters of the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.optim import FTRL, LAMB, LARS
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
