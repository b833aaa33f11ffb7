"""From a batch to a scalar loss: how the batch's parts reach the model and the loss.

positional   step(x1, x2, y)      loss(model(x1, x2), y)
named        step({"x": .., "y": ..})   loss(model(**the entries forward() names), batch)
own loss     loss=None            model(*batch) or model(**batch) returns it: a scalar tensor, an object with
                                  ``.loss``, a dict with "loss", or a tuple whose first item is the loss
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import DataError, LossError, UsageError
from echelon.fast.unsafe import REFUSED
from echelon.parallel.precision import DTYPES
from echelon.strategy import Amp

LossFunction = Callable[..., Tensor]


class Objective:
    """The model and its loss as one function of a batch."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, amp: Amp | None, device: torch.device) -> None:
        self._model, self.loss, self._amp, self._device = model, loss, amp, device
        self._accepts = _accepted_names(model)
        self._with_losses: list[Any] = [module for module in model.modules() if hasattr(module, "auxiliary_loss")]

    def change_loss(self, change: Callable[[LossFunction], LossFunction]) -> None:
        """Have the loss computed by what ``change`` makes of its function; a model's own loss stays."""
        self.loss = None if self.loss is None else change(self.loss)

    def __call__(self, batch: Any) -> tuple[Any, Tensor]:
        """The model's output and the scalar loss, auxiliary losses that modules left behind included."""
        try:
            with self._precision():
                output, loss = self._run(batch)
        except RuntimeError as error:
            if REFUSED not in str(error):
                self._tell_of_precision(error)
                raise
            raise UsageError(
                "binary_cross_entropy was called in 16 bits, which torch refuses; use binary_cross_entropy_with_logits "
                "on what goes into the sigmoid, or Strategy(amp=False)"
            ) from error
        for module in self._with_losses:
            extra, module.auxiliary_loss = module.auxiliary_loss, None
            if isinstance(extra, Tensor) and not isinstance(extra, FakeTensor):  # one of another stage is a stand-in
                loss = loss + extra.to(loss.dtype)
        return output, loss

    def _tell_of_precision(self, error: RuntimeError) -> None:
        """Some operations have no 16 bits, and on a GPU nobody need have asked for them."""
        if self._amp is not None and ("BFloat16" in str(error) or "Half" in str(error)):
            error.add_note(f"(forward and loss run in {self._amp.dtype} here; Strategy(amp=False) keeps fp32)")

    def arguments(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What of the batch the model is called with."""
        if isinstance(batch, Mapping):
            return (), batch if self.loss is None else self._known(batch)
        return batch if self.loss is None or len(batch) == 1 else batch[:-1], {}

    def target(self, batch: Any) -> Any:
        """What metrics compare the output with."""
        return batch if isinstance(batch, Mapping) else batch[-1]

    def _run(self, batch: Any) -> tuple[Any, Tensor]:
        args, named = self.arguments(batch)
        output = self._model(*args, **named)
        if self.loss is None:
            return output, scalar(_own_loss(output))
        alone = not isinstance(batch, Mapping) and len(batch) == 1
        return output, scalar(self.loss(output) if alone else self.loss(output, self.target(batch)))

    def _known(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        known = batch if self._accepts is None else {k: v for k, v in batch.items() if k in self._accepts}
        if not known:
            raise UsageError(
                f"the batch has {sorted(batch)}, but the model's forward() takes {sorted(self._accepts or ())}; "
                "use the same names, or pass the batch by position"
            )
        return known

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self._amp.dtype])


def as_batch(args: tuple[Any, ...], named: dict[str, Any], device: torch.device) -> Any:
    """The arguments of ``step`` as one batch, a tuple or a dict, on the device."""
    if args and named:
        raise UsageError("step() takes the batch by position or by name, not both at once")
    batch: Any = named or args
    if len(args) == 1 and isinstance(args[0], tuple | list | Mapping):
        batch = args[0]
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # a tokenizer's, which torch takes for one value
        batch = dict(batch)
    if not batch:
        raise UsageError("step() was called without a batch")
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def count_samples(batch: Any) -> int:
    """The length of the first dimension of the batch's first tensor."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else None
    for leaf in (first,) if isinstance(first, Tensor) and first.dim() else tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise DataError(
        "the batch holds no tensor with a batch dimension; say how many samples it has: step(..., samples=n)"
    )


def scalar(loss: Any) -> Tensor:
    """``loss`` when it is one number with a gradient; else one line saying what it is."""
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss must be a tensor, got {type(loss).__name__}; compute it with torch operations")
    if loss.numel() != 1:
        raise LossError(f"the loss must be one number, got shape {tuple(loss.shape)}; take its mean")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, tuple) and output:
        return output[0]
    raise LossError(
        f"no loss function was given and the model returned {type(output).__name__} without a loss; "
        "pass loss=... to distribute(), or return the loss from forward()"
    )


def _accepted_names(model: nn.Module) -> set[str] | None:
    """Names forward() takes; ``None`` when it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:  # of a traced module, which does not tell
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL}
