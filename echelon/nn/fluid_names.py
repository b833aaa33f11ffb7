"""Translate the options of Paddle Fluid's ``embedding``, and of torch's, into those of SparseEmbedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import UsageError, nearest

_SAME = {"padding_idx": "padding_id", "num_embeddings": "capacity", "embedding_dim": "dim"}
_FLUID = ("size", "is_sparse", "is_distributed", "param_attr")
_CALL = "SparseEmbedding(width, capacity=dict_size)"


def in_our_names(given: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Return ``given`` under the option names of SparseEmbedding.

    Raises ``UsageError`` for an option that SparseEmbedding has no counterpart of.

    known: SparseEmbedding's own option names
    """
    ours: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SAME:
            ours[_SAME[name]] = value
        elif name == "size":
            ours |= _from_size(value)
        elif name in ("is_sparse", "is_distributed"):
            _check_sparse(name, value)
        elif name == "param_attr":
            ours |= _from_attributes(value)
        else:
            raise UsageError(f"SparseEmbedding has no option '{name}'{nearest(name, [*known, *_FLUID, *_SAME])}")
    if (given.get("padding_idx") or 0) < 0 and "capacity" in ours:
        ours["padding_id"] = ours["capacity"] + given["padding_idx"]  # in Fluid and torch, negative counts from the end
    return ours


def _from_size(size: Any) -> dict[str, Any]:
    """Return the width and the capacity that ``[dict_size, width]`` gives."""
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(each) is int for each in size):
        raise UsageError(f"SparseEmbedding(size={size!r}): expected [dict_size, width], two whole numbers")
    return {"capacity": size[0], "dim": size[1]}


def _check_sparse(name: str, value: Any) -> None:
    if value not in (True, None):
        raise UsageError(
            f"SparseEmbedding({name}={value!r}): its rows are always sparse and on the servers; leave it out, or take "
            "torch.nn.Embedding for a dense table in every process"
        )


def _from_attributes(attributes: Any) -> dict[str, Any]:
    """Return the table name that ``"name"`` or ``ParamAttr(name="name")`` gives."""
    name = attributes if isinstance(attributes, str) else getattr(attributes, "name", None)
    if attributes is None:
        return {}
    others = [each for each in ("initializer", "regularizer") if getattr(attributes, each, None) is not None]
    if not isinstance(name, str) or others:
        raise UsageError(
            f"SparseEmbedding(param_attr={attributes!r}): only its name is used; give name=, optimizer= and "
            f"initializer= to {_CALL}"
        )
    return {"name": name}
