"""Names and byte layouts of the tensors that a checkpoint can store."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch

from echelon.base.errors import CheckpointError

#: The safetensors name of each torch dtype. The index has torch's own name ("bfloat16").
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
#: Older safetensors have no complex numbers: a checkpoint stores them as pairs of reals in one more dimension.
_REAL_PAIRS = {torch.complex64: "F32", torch.complex128: "F64"}
_READ_AS = {word: dtype for dtype, word in _SAFETENSORS.items()}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_SAFETENSORS, *_REAL_PAIRS)}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of that name, ``None`` for one that a checkpoint cannot hold."""
    return _BY_NAME.get(name)


def refuse_unstorable(name: str, tensor: object) -> None:
    """Raise for anything but a dense tensor with values of a dtype that can be stored."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"'{name}' is a {type(tensor).__name__}, not a tensor; store it with the metadata (facts=)"
        )
    if tensor.dtype not in _BY_NAME.values() or tensor.layout != torch.strided:
        kind = name_of(tensor.dtype) if tensor.layout == torch.strided else f"{tensor.layout} tensor"
        raise CheckpointError(f"'{name}' is a {kind}, which cannot be stored; convert it to a dense one first")
    if tensor.is_meta:
        raise CheckpointError(f"'{name}' is on the meta device and holds no values; give it a real device")


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the safetensors dtype and shape of a tensor in a checkpoint's file."""
    if dtype in _REAL_PAIRS:
        return _REAL_PAIRS[dtype], [*shape, 2]
    return _SAFETENSORS[dtype], list(shape)


def exported_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the safetensors dtype and shape for other programs, with complex dtypes if safetensors has them."""
    return (_SAFETENSORS[dtype], list(shape)) if dtype in _SAFETENSORS else stored_as(dtype, shape)


def read_as(word: str) -> torch.dtype | None:
    """Return the dtype that safetensors calls ``word``, ``None`` if torch has none for it."""
    return _READ_AS.get(word)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the values in row-major order; without a copy if they are contiguous in host memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
    return flat


def tensor_of(raw: numpy.typing.NDArray[numpy.uint8], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that shares the memory of these bytes."""
    if not raw.size:
        return torch.empty(list(shape), dtype=dtype)  # torch cannot view zero bytes as another dtype
    return torch.from_numpy(raw).view(dtype).view(list(shape))
