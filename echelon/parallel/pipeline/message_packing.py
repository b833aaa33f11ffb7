"""Pack several tensors into one buffer of bytes, with a description that the receiver can read."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.base.errors import UsageError

ALIGNMENT = 64  # bytes; enough for the elements of every dtype and for a GPU's widest loads


class PackedTensorSpec(NamedTuple):
    """Description of one tensor. ``strides`` are dense and keep the order of dimensions, such as channels last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    wants_gradient: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        gradient = " with gradient" if self.wants_gradient else ""
        return f"{_name(self.dtype)} {list(self.shape)}{gradient}"


Form = tuple[PackedTensorSpec | None, ...]  #: the tensors of one message; None for a missing tensor


def form_of(tensors: Sequence[Tensor | None], *, training: bool) -> Form:
    return tuple(None if tensor is None else _field(tensor, training) for tensor in tensors)


def same_form(form: Form, other: Form) -> bool:
    """Return True if the forms are equal except for strides; packed tensors get the strides that were announced."""
    return form == other or [field and field._replace(strides=()) for field in form] == [
        field and field._replace(strides=()) for field in other
    ]


def _field(tensor: Tensor, training: bool) -> PackedTensorSpec:
    if tensor.layout != torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot go from stage to stage; hand on tensor.to_dense()")
    strides = _dense_strides(tensor.shape, tensor.stride())
    return PackedTensorSpec(tensor.dtype, tuple(tensor.shape), strides, training and tensor.requires_grad)


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    dense, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        dense[dim] = step
        step *= max(1, shape[dim])
    return tuple(dense)


@functools.lru_cache(maxsize=1024)
def alone(form: Form) -> PackedTensorSpec | None:
    """Return the tensor of a message that has only one, contiguous and not empty, so that it need not be packed."""
    field = form[0] if len(form) == 1 else None
    if field is None or not field.bytes or field.dtype.is_complex:
        return None
    rows = torch.empty(field.shape, device="meta").stride()
    return field if field.strides == rows else None


# ---- as JSON ----


def to_json(form: Form) -> list[Any]:
    return [field and [_name(field.dtype), field.shape, field.strides, field.wants_gradient] for field in form]


def from_json(message: list[Any]) -> Form:
    return tuple(
        field and PackedTensorSpec(_dtype(field[0]), tuple(field[1]), tuple(field[2]), bool(field[3]))
        for field in message
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"a peer sent the unknown dtype '{name}'"
    return dtype


# ---- as bytes ----


@functools.lru_cache(maxsize=1024)
def packed_size(form: Form) -> int:
    return _offsets(form, 0)[-1]


def pack(tensors: Sequence[Tensor | None], form: Form, into: Tensor) -> None:
    for tensor, window in zip(tensors, _windows(into, form, 0), strict=True):
        if tensor is not None and window is not None:
            window.copy_(tensor.detach(), non_blocking=True)


def unpack(buffer: Tensor, form: Form) -> list[Tensor | None]:
    """Return the tensors, each in its part of the buffer, as leaves that require a gradient if the sender's did."""
    return [
        window.requires_grad_(field.wants_gradient) if window is not None and field is not None else None
        for window, field in zip(_windows(buffer, form, 0), form, strict=True)
    ]


# ---- gradients: those that a form wants, after one byte per tensor that is 1 if there is a gradient ----


@functools.lru_cache(maxsize=1024)
def gradients_form(form: Form) -> Form:
    return tuple(field if field is not None and field.wants_gradient else None for field in form)


@functools.lru_cache(maxsize=1024)
def packed_gradients_size(form: Form) -> int:
    """Return the bytes of a message of gradients; 0 if no tensor wants one."""
    wanted = gradients_form(form)
    return _offsets(wanted, len(form))[-1] if any(wanted) else 0


def packed_gradient(gradients: Sequence[Tensor | None], form: Form) -> Tensor | None:
    """Return the bytes of ``pack_gradients`` in one operation, for the gradient of a tensor ``alone``; else None."""
    field, gradient = alone(form), gradients[0] if gradients else None
    if field is None or gradient is None or not field.wants_gradient or gradient.dtype != field.dtype:
        return None
    return torch.cat((_THERE, gradient.detach().reshape(-1).view(torch.uint8)))


_THERE = torch.ones(ALIGNMENT, dtype=torch.uint8)


def pack_gradients(gradients: Sequence[Tensor | None], form: Form, into: Tensor) -> None:
    wanted = gradients_form(form)
    into[: len(form)] = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    for gradient, window in zip(gradients, _windows(into, wanted, len(form)), strict=True):
        if gradient is not None and window is not None:
            window.copy_(gradient.detach(), non_blocking=True)


def unpack_gradients(buffer: Tensor, form: Form, present: Sequence[int]) -> list[Tensor | None]:
    """Return the gradients in the buffer. ``present``: the bytes at its beginning, read on the host."""
    windows = _windows(buffer, gradients_form(form), len(form))
    return [window if there else None for window, there in zip(windows, present, strict=True)]


@functools.lru_cache(maxsize=1024)
def _offsets(form: Form, first: int) -> tuple[int, ...]:
    """Return the offset of each tensor, and the end of the last one."""
    sizes = [field.bytes if field else 0 for field in form]
    begins = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in (first, *sizes[:-1])))
    return (*begins, begins[-1] + sizes[-1]) if sizes else tuple(begins)


def _windows(buffer: Tensor, form: Form, first: int) -> list[Tensor | None]:
    """Return tensors that share the buffer's storage.

    They are not views of it: autograd would take an in-place change of one for a change of the others.
    """
    storage = buffer.untyped_storage()
    return [
        field
        and torch.empty(0, dtype=field.dtype, device=buffer.device).set_(
            storage, offset // field.dtype.itemsize, field.shape, field.strides
        )
        for offset, field in zip(_offsets(form, first), form, strict=False)
    ]
