"""A model as two programs of ``torch.export``: one from inputs to ids, one from inputs and rows to predictions.

Between the two the reader looks the ids up. So no program knows where rows are, and ids may be computed in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.errors import UsageError, one_line
from echelon.parameter_server.servable.servable_head import ServedInput
from echelon.parameter_server.worker.sparse_embedding import SparseEmbedding

#: What a reader can do with a model that torch.export cannot trace.
_INSTEAD = "leave --model out: the directory then has the weights, and load_servable(DIR, model=...) runs your module"
#: Rows of the sample; more than one, so that torch.export takes their number for variable.
_ROWS = 3


class RecordedIds:
    """A source of rows that records the ids of every lookup, and answers with rows that stand in for the real ones."""

    def __init__(self, dims: Mapping[str, int], stand_in: Tensor) -> None:
        self.dims, self.stand_in = dims, stand_in
        self.calls: list[tuple[str, Tensor]] = []

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.calls.append((table, ids))
        return self.stand_in.expand(1, self.dims[table]), torch.zeros_like(ids).reshape(-1)


class GivenRows:
    """A source of rows that answers each lookup, in order, with the rows and indices that it was given."""

    def __init__(self, rows: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        self._answers = iter(list(zip(rows, indices, strict=True)))

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, index = next(self._answers)
        return rows, index.reshape(-1)


class _LookupProgram(nn.Module):
    """The forward of a model up to its lookups: the ids of each."""

    stand_in: Tensor

    def __init__(self, model: nn.Module, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.model, self._dims = model, dims
        self.register_buffer("stand_in", torch.zeros(1, 1))
        self.tables: list[str] = []

    def forward(self, inputs: Any) -> list[Tensor]:
        recorded = RecordedIds(self._dims, self.stand_in)
        _connect(self.model, recorded)
        self.model(*inputs)
        self.tables = [table for table, _ in recorded.calls]
        return [ids.clone() for _, ids in recorded.calls]


class _DenseProgram(nn.Module):
    """The forward of a model whose rows are inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any, rows: list[Tensor], indices: list[Tensor]) -> Any:
        _connect(self.model, GivenRows(rows, indices))
        return self.model(*inputs)


def table_names(model: nn.Module) -> dict[str, str]:
    """Return the table of each SparseEmbedding by its path in the model, as ``distribute`` names them."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, SparseEmbedding)}
    return {path: module.spec.name or path or "embedding" for path, module in found.items()}


def _connect(model: nn.Module, source: Any) -> None:
    names = table_names(model)
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            module.connect(names[path], lambda: source)


def export_programs(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, Any, tuple[str, ...]]:
    """Return the two programs of a model in evaluation mode, and the table of each lookup.

    inputs: sample inputs of the model; dimension 0 of each tensor is the batch, of any size later
    """
    dims = {table_names(model)[path]: each.dim for path, each in model.named_modules() if path in table_names(model)}
    if not dims:
        raise UsageError(f"{type(model).__name__} has no SparseEmbedding; torch.export alone makes it servable")
    if any(leaf.dim() and leaf.shape[0] < 2 for leaf in _tensors(inputs)):
        raise UsageError("the sample inputs have a batch of one, which torch.export takes for fixed; give two samples")
    finder = _LookupProgram(model, dims)
    ids = finder(inputs)
    tables = tuple(finder.tables)
    lookups = _exported(finder, (inputs,), model)
    _keep_lookups(lookups, tables)
    rows = [torch.zeros(_ROWS, dims[table]) for table in tables]
    dense = _exported(_DenseProgram(model), (inputs, rows, [torch.zeros_like(each) for each in ids]), model)
    return lookups, dense, tables


def _exported(program: nn.Module, given: tuple[Any, ...], model: nn.Module) -> Any:
    auto = torch.export.Dim.AUTO
    shapes = tree_map(lambda leaf: {0: auto} if isinstance(leaf, Tensor) and leaf.dim() else None, given)
    name = type(model).__name__
    try:
        exported = torch.export.export(program.eval(), given, dynamic_shapes=shapes)
    except Exception as error:
        raise UsageError(f"torch.export cannot trace {name}: {one_line(error, 300, typed=True)}; {_INSTEAD}") from error
    named = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    for number, name_in_graph in enumerate(exported.graph_signature.user_inputs):
        value = named.get(name_in_graph)
        if isinstance(value, Tensor) and value.dim() and str(value.shape[0]).isdigit():
            raise UsageError(
                f"torch.export finds {name}'s batch fixed: dimension 0 of input {number} is always {value.shape[0]} in "
                f"its forward; use x.shape[0] there, or {_INSTEAD}"
            )
    return exported


def _keep_lookups(exported: Any, tables: Sequence[str]) -> None:
    """Reduce the program of the lookups to what the ids need, and its weights to those.

    torch's own elimination keeps random operations such as a dropout, and all that leads to them. Raises ``UsageError``
    if a lookup's ids depend on rows of another, which are not known when ids are asked for.
    """
    signature, output = exported.graph_signature, next(node for node in exported.graph.nodes if node.op == "output")
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    needed: set[Any] = {output}
    for table, ids in zip(tables, output.args[0], strict=True):
        left = [ids]
        while left:
            node = left.pop()
            if targets.get(node.name) == "stand_in":
                raise UsageError(
                    f"a lookup of table '{table}' computes its ids from rows of another lookup, which a program of "
                    f"torch.export cannot know; {_INSTEAD}"
                )
            if node not in needed:
                needed.add(node)
                left += node.all_input_nodes
    for node in reversed(list(exported.graph.nodes)):
        if node not in needed and node.op != "placeholder":
            exported.graph.erase_node(node)
        elif node not in needed and (target := targets.get(node.name)) in exported.state_dict:
            value = exported.state_dict[target]
            empty = value.detach().new_zeros(0)
            exported.state_dict[target] = nn.Parameter(empty, False) if isinstance(value, nn.Parameter) else empty


def described(inputs: tuple[Any, ...]) -> tuple[ServedInput, ...]:
    """Return the inputs for the head."""
    return tuple(
        ServedInput(dtype=str(leaf.dtype).removeprefix("torch."), shape=(-1, *leaf.shape[1:]) if leaf.dim() else ())
        for leaf in _tensors(inputs)
    )


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
