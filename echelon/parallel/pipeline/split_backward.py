"""Split backward into two parts for zero-bubble schedules: first gradients of inputs, later gradients of weights.

    store = WeightGradStore()              # one for every stage and micro-batch
    with defer_weight_grads(store):
        output = stage(input)
    with defer_weight_grads(store):        # here too: a recomputed forward must do the same as the first one
        output.backward(gradient)          # gradients of inputs, and of weights that are used in no layer listed below
    store.run()                            # gradients of the other weights

Linear layers (also the projections of attention), convolutions and embeddings are split. Every parameter receives its
gradient once, through autograd, in one of the two parts: its hooks fire once per micro-batch, as with one backward.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")
Gradients = Callable[[], list[tuple[nn.Parameter, Tensor]]]


class WeightGradStore:
    """The deferred gradients of weights of one stage and micro-batch."""

    def __init__(self) -> None:
        self.active = 0  # number of defer_weight_grads() contexts that are entered
        self._later: list[Gradients] = []
        self._left = Counter[nn.Parameter]()  # number of gradients still to be computed
        self._taken: dict[nn.Parameter, Tensor | None] = {}  # with a stand-in if also used by other operations
        self._elsewhere: set[nn.Parameter] = set()

    def take(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if the gradients of these parameters may be deferred.

        They may not if another operation already uses one of them: its gradient comes in the first part, so the
        parameter would receive two gradients.
        """
        if not self._elsewhere.isdisjoint(parameters):
            return False
        for parameter in parameters:
            self._taken.setdefault(parameter, None)
        return True

    def substitute(self, value: Any) -> Any:
        """Return a stand-in for a parameter whose gradient is deferred, for use by another operation.

        The stand-in collects the gradient of the first part. Other values are returned unchanged.
        """
        if not isinstance(value, nn.Parameter) or value not in self._taken:
            return value
        stand_in = self._taken[value]
        if stand_in is None:
            stand_in = self._taken[value] = value.detach().requires_grad_()
        return stand_in

    def used_elsewhere(self, parameter: nn.Parameter) -> None:
        self._elsewhere.add(parameter)

    def defer(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
        self._left.update(parameters)
        self._later.append(gradients)

    def run(self) -> None:
        """Compute and accumulate the deferred gradients, in the order of backward."""
        sums: dict[nn.Parameter, Tensor | None] = {
            parameter: found.grad for parameter, found in self._taken.items() if found is not None
        }
        while self._later:
            for parameter, gradient in self._later.pop(0)():
                before = sums.get(parameter)
                sums[parameter] = gradient if before is None else before + gradient
                self._left[parameter] -= 1
                if not self._left[parameter]:
                    _accumulate(parameter, sums.pop(parameter))
        for parameter, collected in sums.items():  # parameters whose layers have no part in the loss
            _accumulate(parameter, collected)
        self._taken.clear()

    def __len__(self) -> int:
        return len(self._later)


def _accumulate(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Accumulate a gradient into ``.grad`` with all hooks, as autograd does at the end of a backward pass."""
    if gradient is not None:
        torch.autograd.backward([parameter], [gradient.to(parameter.dtype)])


@contextlib.contextmanager
def defer_weight_grads(store: WeightGradStore) -> Iterator[None]:
    """Defer the gradients of weights to ``store``; forward and backward of a stage must both run in this context."""
    store.active += 1
    try:
        with _WeightGradDeferralMode(store):
            yield
    finally:
        store.active -= 1


class _WeightGradDeferralMode(TorchFunctionMode):
    def __init__(self, store: WeightGradStore) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _BACKWARD:
            with self:  # torch disables the mode in here, but forwards that backward recomputes need it
                return _BACKWARD[function](*args, **kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            return _attention(self._store)(*args, **kwargs)
        if function in _LAYERS:
            return _LAYERS[function](self._store, *args, **kwargs)
        return _plainly(self._store, function, *args, **kwargs)


def _plainly(store: WeightGradStore, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    if not _hold_parameters(args) and not _hold_parameters(kwargs.values()):
        return function(*args, **kwargs)
    args, kwargs = tree_map(store.substitute, (args, kwargs))
    result = function(*args, **kwargs)
    _note_uses(store, (args, kwargs), result)
    return result


def _hold_parameters(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, nn.Parameter) or (isinstance(value, list | tuple) and _hold_parameters(value))
        for value in values
    )


def _note_uses(store: WeightGradStore, given: Any, result: Any) -> None:
    """Mark the parameters that contribute to ``result`` as used elsewhere.

    Reading a shape, or converting to the same dtype, does not count.
    """
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    if any(tensor.requires_grad for tensor in made):
        for leaf in tree_leaves(given):
            if isinstance(leaf, nn.Parameter):
                store.used_elsewhere(leaf)


# ---- one layer with a split backward ----


class _Layer(Protocol):
    """A layer with a split backward; ``for_input`` is not called if the input needs no gradient."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def for_input(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor: ...
    def for_weights(self, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool) -> Sequence[Tensor]: ...


class _SplitBackward(torch.autograd.Function):
    """Computes the gradient of the input, and defers those of the parameters.

    The parameters are not inputs for autograd, because their hooks would fire in the first part, without a gradient.
    ``anchor`` makes the result require a gradient if ``input`` does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        anchor: Tensor | None,
        parameters: Sequence[nn.Parameter],
        layer: _Layer,
        store: WeightGradStore,
    ) -> Tensor:
        # Autocast has already converted a floating-point input, and would convert the weights to the same dtype.
        dtype = input.dtype if _casts(input) else parameters[0].dtype
        weight, *bias = (_of(dtype, parameter) for parameter in parameters)
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.store, ctx.parameters = layer, store, parameters
        ctx.set_materialize_grads(False)
        return layer.forward(input, weight, *bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        assert ctx.store.active, "the backward of a stage must run under defer_weight_grads(), as its forward did"
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None, None
        input, weight = ctx.saved_tensors
        parameters = ctx.parameters
        for_weights = functools.partial(ctx.layer.for_weights, gradient, input, weight, bias=len(parameters) > 1)
        ctx.store.defer(parameters, lambda: list(zip(parameters, for_weights(), strict=True)))
        for_input = ctx.layer.for_input(gradient, input, weight) if ctx.needs_input_grad[0] else None
        return for_input, None, None, None, None


def _of(dtype: torch.dtype, parameter: nn.Parameter) -> Tensor:
    """Return the parameter in ``dtype``.

    The result requires a gradient, because torch chooses between matmul kernels, which round differently, by that.
    """
    return parameter if parameter.dtype == dtype else parameter.detach().to(dtype).requires_grad_()


def _casts(input: Tensor) -> bool:
    return torch.is_autocast_enabled(input.device.type) and input.is_floating_point() and input.dtype != torch.float64


def _take_apart(store: WeightGradStore, layer: _Layer, input: Tensor, *parameters: Tensor | None) -> Tensor | None:
    """Return the output of the layer with a split backward, or None if the backward cannot be split.

    It cannot if a weight is computed from others, is frozen, or was used before by another operation.
    """
    given = [parameter for parameter in parameters if parameter is not None]
    trained = [one for one in given if isinstance(one, nn.Parameter) and one.requires_grad and one.is_leaf]
    if len(trained) < len(given) or not store.take(trained):
        return None
    if _casts(input):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    anchor = None if input.requires_grad else torch.empty(0, requires_grad=True)
    result: Tensor = _SplitBackward.apply(input, anchor, trained, layer, store)  # type: ignore[no-untyped-call]
    return result


# ---- the layers ----


class _Linear:
    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(input, weight, bias)

    def for_input(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return _rows(gradient).mm(weight).view(input.shape)

    def for_weights(self, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool) -> list[Tensor]:
        rows = _rows(gradient)
        return [rows.t().mm(_rows(input)), *([rows.sum(0)] if bias else [])]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class _Convolution:
    function: Callable[..., Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.function(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def for_input(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, input, weight, [True, False, False])[0]

    def for_weights(self, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool) -> list[Tensor]:
        return self._backward(gradient, input, weight, [False, True, bias])[1 : 2 + bias]

    def _backward(self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
        result = torch.ops.aten.convolution_backward(
            gradient,
            input,
            weight,
            [weight.shape[0]],  # size of the bias
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            (0,) * len(self.stride),  # output padding
            self.groups,
            wanted,
        )
        return list(result)


@dataclass(frozen=True)
class _Embedding:
    padding_index: int | None
    by_frequency: bool

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.embedding(input, weight, self.padding_index, scale_grad_by_freq=self.by_frequency)

    def for_input(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def for_weights(self, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool) -> list[Tensor]:
        words = weight.shape[0]
        padding = -1 if self.padding_index is None else self.padding_index % words
        return [torch.ops.aten.embedding_dense_backward(gradient, input, words, padding, self.by_frequency)]


# ---- replacements of the functions that torch.nn calls ----


def _linear(store: WeightGradStore, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    taken = _take_apart(store, _Linear(), input, weight, bias)
    return _plainly(store, F.linear, input, weight, bias) if taken is None else taken


def _convolution(function: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def call(
        store: WeightGradStore, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        taken = None
        if input.dim() == dims + 2 and not isinstance(padding, str):
            layer = _Convolution(function, _each(stride, dims), _each(padding, dims), _each(dilation, dims), groups)
            taken = _take_apart(store, layer, input, weight, bias)
        if taken is None:
            return _plainly(store, function, input, weight, bias, stride, padding, dilation, groups)
        return taken

    return call


def _embedding(
    store: WeightGradStore, input: Tensor, weight: Tensor,
    padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    taken = None
    if max_norm is None and not sparse:
        taken = _take_apart(store, _Embedding(padding_idx, scale_grad_by_freq), input, weight)
    if taken is None:
        return _plainly(store, F.embedding, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return taken


def _each(value: Any, dims: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * dims if len(given) == 1 else given


_LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.conv1d: _convolution(torch.conv1d, 1),
    torch.conv2d: _convolution(torch.conv2d, 2),
    torch.conv3d: _convolution(torch.conv3d, 3),
    F.embedding: _embedding,
}


# ---- torch functions without their __torch_function__ check, which would call the mode again without end ----


def _behind_the_check(function: Any, inner: Sequence[str] = (), **replaced: Any) -> Callable[..., Any]:
    """Return a copy of ``function`` without its __torch_function__ check.

    inner:     names of functions it calls that are copied in the same way
    replaced:  functions, by global name, that the copies call instead of the original ones
    """
    names = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False), **replaced}
    for name in (*inner, function.__name__):
        whole = function.__globals__[name]
        names[name] = types.FunctionType(whole.__code__, names, name, whole.__defaults__)
        names[name].__kwdefaults__ = whole.__kwdefaults__
    result: Callable[..., Any] = names[function.__name__]
    return result


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _attention(store: WeightGradStore) -> Callable[..., Any]:
    """Return torch's attention with ``_linear`` in place of ``linear``.

    The replacement is needed because a mode does not see calls that are made inside its own handler.
    """
    inner = ("_in_projection", "_in_projection_packed")
    return _behind_the_check(F.multi_head_attention_forward, inner, linear=functools.partial(_linear, store))


_run_backward = _behind_the_check(torch.autograd.backward)


def _tensor_backward(
    tensor: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _run_backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARD: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _tensor_backward,
    torch.autograd.backward: _run_backward,
    torch.autograd.grad: _behind_the_check(torch.autograd.grad),
}
