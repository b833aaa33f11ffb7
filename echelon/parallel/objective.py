"""Computes the scalar loss of a batch: passes the parts of the batch to the model and to the loss function.

positional   step(x1, x2, y)      loss(model(x1, x2), y)
named        step({"x": .., "y": ..})   loss(model(**the entries forward() names), batch)
own loss     loss=None            model(*batch) or model(**batch) returns it: a scalar tensor, an object with
                                  ``.loss``, a dict with "loss", or a tuple with one scalar, the loss, in any place
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.errors import DataError, LossError, UsageError
from echelon.optim.grad_scaler import DTYPES
from echelon.parallel.autocast_unsafe import REFUSED
from echelon.parallel.loss.loss_calls import SeenLoss, can_trace, record_loss_calls, trace_loss
from echelon.strategy import Amp

if TYPE_CHECKING:
    from echelon.parallel.step_outputs import StepOutputs

LossFunction = Callable[..., Tensor]


class Objective:
    """The model and its loss as one function of a batch."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, amp: Amp | None, device: torch.device) -> None:
        self._model = model
        self.loss = loss
        self._amp = amp
        self._device = device
        self._accepts = _accepted_names(model)
        self.outputs: StepOutputs | None = None  #: collects the model's outputs in a step with ``outputs=True``
        self._seen: SeenLoss | None = None
        self._main: Tensor | None = None  # the latest loss, without auxiliary losses
        self._with_losses: list[Any] = [module for module in model.modules() if hasattr(module, "auxiliary_loss")]

    def collect_outputs(self, collector: StepOutputs | None) -> None:
        """Collect the model's outputs from now on; None ends it."""
        self.outputs = collector

    def change_loss(self, change: Callable[[LossFunction], LossFunction]) -> None:
        """Replace the loss function by ``change(loss)``; a loss that the model computes itself is not changed."""
        self.loss = None if self.loss is None else change(self.loss)

    def __call__(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the model's output and the scalar loss, including the auxiliary losses that modules have set."""
        try:
            with self._precision():
                output, loss = self._run(batch)
        except RuntimeError as error:
            if REFUSED not in str(error):
                self._report_precision(error)
                raise
            raise UsageError(
                "binary_cross_entropy was called in 16 bits, which torch refuses; use binary_cross_entropy_with_logits "
                "on the input of the sigmoid, or Strategy(amp=False)"
            ) from error
        except TypeError as error:
            if line := self._refused_call(error, batch):
                raise UsageError(line) from error
            raise
        self._main = loss if self._with_losses else None
        for module in self._with_losses:
            extra, module.auxiliary_loss = module.auxiliary_loss, None
            if isinstance(extra, Tensor) and not isinstance(extra, FakeTensor):  # another stage's loss is a fake tensor
                loss = loss + extra.to(loss.dtype)
        if self.outputs is not None:
            self.outputs.add(output, count_samples(batch))
        return output, loss

    def forward_loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self(batch)[1]

    def main_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss``, the latest result, without auxiliary losses."""
        main, self._main = self._main, None
        return loss if main is None else main

    def _refused_call(self, error: TypeError, batch: Any) -> str:
        """Return an error line if the model or the loss was called with wrong arguments; '' otherwise."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        values = f"{len(batch)} value{'s' if len(batch) > 1 else ''}"
        if f"{type(self._model).__name__}.forward()" in str(error):
            called = f"the model was called with all of the batch ({values}), since distribute() was given no loss"
            remedy = "give distribute(loss=...), or a model that takes the target and returns its loss"
            if self.loss is not None:
                called = f"the model was called with the batch ({values}) but for its last one, the target"
                remedy = "give step() the arguments of forward(), and the target last"
            return f"{called}: {error}; {remedy}"
        if trace is not None and trace.tb_frame.f_code is Objective._loss_of.__code__:
            remedy = "call step(inputs, target)" if len(batch) == 1 else "write it as loss(output, target)"
            return f"the loss could not be called for a batch of {values}: {error}; {remedy}"
        return ""

    def _report_precision(self, error: RuntimeError) -> None:
        """Add a note on autocast to an error: some operations lack 16-bit kernels, and autocast is default on a GPU."""
        if self._amp is not None and ("BFloat16" in str(error) or "Half" in str(error)):
            error.add_note(f"(forward and loss run in {self._amp.dtype} here; Strategy(amp=False) keeps fp32)")

    def arguments(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the positional and named arguments of the model for this batch."""
        if isinstance(batch, Mapping):
            return (), batch if self.loss is None else self._known(batch)
        return batch if self.loss is None or len(batch) == 1 else batch[:-1], {}

    def target(self, batch: Any) -> Any:
        """Return the target that the loss and metrics compare the output with."""
        return batch if isinstance(batch, Mapping) else batch[-1]

    def _run(self, batch: Any) -> tuple[Any, Tensor]:
        args, named = self.arguments(batch)
        if torch.is_grad_enabled():
            output = self._model(*args, **named)
            return output, scalar(self._loss_of(output, batch))
        with record_loss_calls() as calls:
            output = self._model(*args, **named)
            if self.loss is not None and can_trace(output):
                traced = scalar(trace_loss(lambda given: self._loss_of(given, batch), output))
                self._seen = SeenLoss(traced, calls)
                return output, traced.detach()
            loss = scalar(self._loss_of(output, batch))
        self._seen = SeenLoss(None, calls)
        return output, loss

    def _loss_of(self, output: Any, batch: Any) -> Any:
        if self.loss is None:
            return _own_loss(output)
        alone = not isinstance(batch, Mapping) and len(batch) == 1
        return self.loss(output) if alone else self.loss(output, self.target(batch))

    def take_seen(self) -> SeenLoss | None:
        """Return the record of the latest loss, if it was computed without gradients, and clear it."""
        seen, self._seen = self._seen, None
        return seen

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
    """Return the arguments of ``step`` as one batch, a tuple or a dict, on the device."""
    if args and named:
        raise UsageError("step() takes the batch by position or by name, not both at once")
    batch: Any = named or args
    if len(args) == 1 and isinstance(args[0], tuple | list | Mapping):
        batch = args[0]
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # a tokenizer's BatchEncoding is one pytree leaf
        batch = dict(batch)
    if not batch:
        raise UsageError("step() was called without a batch")
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def has_rows(batch: Any) -> bool:
    """Return True if the batch holds a tensor with a batch dimension."""
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in tree_leaves(batch))


def count_samples(batch: Any) -> int:
    """Return the length of the first dimension of the batch's first tensor."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else None
    for leaf in (first,) if isinstance(first, Tensor) and first.dim() else tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    if any(type(leaf).__module__ == "numpy" for leaf in tree_leaves(batch)):
        raise DataError("the batch holds numpy arrays; make tensors of them: torch.from_numpy(array)")
    raise DataError(
        "the batch holds no tensor with a batch dimension; say how many samples it has: step(..., samples=n)"
    )


def scalar(loss: Any) -> Tensor:
    """Return ``loss`` as a scalar tensor; raise LossError if it is not a tensor of one number."""
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss must be a tensor, got {type(loss).__name__}; compute it with torch operations")
    if loss.numel() != 1:
        raise LossError(f"the loss must be one number, got shape {tuple(loss.shape)}; take its mean")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        if output.numel() != 1:
            raise LossError(
                f"no loss function was given and the model returned a tensor of shape {tuple(output.shape)}; pass "
                "loss=... to distribute(), or return the loss from forward()"
            )
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, tuple | list) and output:
        return _scalar_of(output)
    raise LossError(
        f"no loss function was given and the model returned {type(output).__name__} without a loss; "
        "pass loss=... to distribute(), or return the loss from forward()"
    )


def _scalar_of(output: Sequence[Any]) -> Tensor:
    """Return the loss among several outputs: the only scalar, as in ``(logits, loss)``, or else a scalar first item."""
    tensors: list[Tensor] = [item for item in output if isinstance(item, Tensor)]
    numbers = [item for item in tensors if item.is_floating_point() and item.numel() == 1]
    scalars = [item for item in numbers if item.dim() == 0]
    for found in (scalars, numbers):
        if len(found) == 1:
            return found[0]
    comes_first = bool(numbers) and numbers[0] is output[0]
    if comes_first:
        return numbers[0]
    shown = ", ".join(_shown(item) for item in output)
    if not numbers:
        raise LossError(
            f"no loss function was given and the model returned ({shown}), of which nothing is one number; give the "
            "model its targets, pass loss=... to distribute(), or return the loss from forward()"
        )
    raise LossError(
        f"no loss function was given and the model returned ({shown}), of which {len(numbers)} may be the loss; return "
        "the loss first, or a dict with 'loss'"
    )


def _shown(item: Any) -> str:
    return f"tensor {list(item.shape)}" if isinstance(item, Tensor) else "None" if item is None else type(item).__name__


def _accepted_names(model: nn.Module) -> set[str] | None:
    """Return the names that forward() accepts; ``None`` if it accepts any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:  # a traced module has no signature
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL}
