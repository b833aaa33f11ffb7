"""SparseEmbedding: an embedding for any int64 id, with rows on parameter servers or in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import DataError, UsageError, nearest
from echelon.nn.fluid_names import in_our_names
from echelon.nn.packed import Packed
from echelon.parameter_server.device_table.row_location import Location, RowLocation
from echelon.parameter_server.protocol.job_spec import Initializer, RowDtype, TableSpec
from echelon.strategy.show_click_score import ShowClickScore
from echelon.strategy.sparse_update_rules import NAMED, Rule

Combiner = Literal["sum", "mean", "sqrtn"]
#: Names of the formats of weights, also those of torch.
_DTYPES: dict[str, RowDtype] = {
    "float32": "float32", "float": "float32", "fp32": "float32",
    "bf16": "bf16", "bfloat16": "bf16", "int8": "int8",
}  # fmt: skip


class RowSource(Protocol):
    """Interface of the source of rows."""

    def lookup(self, table: str, ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return rows, and the index of each id's row among them; None: rows in the order of the ids.

        offsets: where the samples' bags begin, for tables that count shows and clicks
        """


class SparseEmbedding(nn.Module):
    """A table of rows for any int64 id, such as a negative id, 0 or 2**63 - 1; training an id creates its row.

    The module has no parameters: the rows are not part of the model, and the optimizer given to ``distribute`` does not
    see them. The server applies their gradients with ``optimizer``.

    dim:         floats per row
    more:        refused, because a table has no number of ids
    name:        name of the table; default: the module's own name in the model. Modules of one name share a table
    optimizer:   a rule of ``echelon.strategy.sparse_update_rules``, or its name: sgd, momentum, adagrad, row_adagrad,
                 adam, ftrl
    initializer: distribution of a row's initial weights, which depend on the seed, the table and the id alone; a number
                 b is uniform in [-b, b)
    combiner:    reduction of a bag of ids to one vector: "sum", "mean", or "sqrtn", which is the sum divided by the
                 root of the sum of squared weights; default: none
    padding_id:  id that reads as zeros and is never trained; default: none
    capacity:    most rows of the table over all servers; default: limited by memory only
    on_full:     raise an error for new rows ("error", default), or evict the least recently ("lru") or least frequently
                 ("lfu") pushed rows
    admit_after: number of pushes of an id from which on its row can be created; default 1
    admit_probability: probability, at each such push, that the row is created; default 1
    expire_passes: passes over the data without a push after which a row is removed; default: never
    expire_seconds: seconds without a push after which a row is removed; default: never
    score:       ``ShowClickScore`` (or "show_click" for its defaults) counts shows and clicks of each row, and removes
                 rows with a low score at the end of a pass; default: does neither
    disk:        True keeps rows in a memory-mapped file, so that cold rows can leave memory; default False
    dtype:       format in which weights are kept: "float32" (default), or "bf16" or "int8" with stochastic rounding
    location:    memory that holds the rows: "host" (default), "device", that of the worker's GPU, or "cached", the
                 host's, with the rows in use on the GPU; the last two for ps="collective" or one process
    cache_rows:  with location="cached", rows that the GPU has room for
    other_names: Fluid's spelling (``size=[dict_size, width], is_sparse=True``) and torch's (``num_embeddings``)

    >>> embedding = echelon.nn.SparseEmbedding(16, name="users", combiner="mean")
    """

    def __init__(
        self,
        dim: int | Sequence[int] | None = None,
        *more: int,
        name: str | None = None,
        optimizer: Rule | str = "adagrad",
        initializer: Initializer | float | None = None,
        combiner: Combiner | None = None,
        padding_id: int | None = None,
        capacity: int | None = None,
        on_full: Literal["error", "lru", "lfu"] = "error",
        admit_after: int = 1,
        admit_probability: float = 1.0,
        expire_passes: int | None = None,
        expire_seconds: float | None = None,
        score: ShowClickScore | Literal["show_click"] | None = None,
        disk: bool = False,
        dtype: str | torch.dtype | None = None,
        location: Location = "host",
        cache_rows: int | None = None,
        **other_names: Any,
    ) -> None:
        super().__init__()
        if more:
            raise UsageError(
                f"SparseEmbedding({dim!r}, {more[0]!r}): expected one number, the floats a row; "
                f"torch.nn.Embedding(rows, width) is SparseEmbedding(width, capacity=rows)"
            )
        if isinstance(dim, list | tuple):
            dim, other_names = None, {"size": dim, **other_names}
        if other_names:
            ours = in_our_names(other_names, list(SparseEmbedding.__init__.__annotations__))
            dim = _once("dim", dim, ours)
            capacity, name = _once("capacity", capacity, ours), _once("name", name, ours)
            padding_id = _once("padding_id", padding_id, ours)
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise UsageError(f"SparseEmbedding(dim={dim!r}): expected the number of floats a row")
        if combiner not in (None, "sum", "mean", "sqrtn"):
            raise UsageError(f"SparseEmbedding(combiner={combiner!r}): expected 'sum', 'mean', 'sqrtn' or None")
        self.dim, self.combiner, self.padding_id = dim, combiner, padding_id
        self._spec = TableSpec(
            name=name or "",
            dim=dim,
            rule=_rule(optimizer),
            initializer=_initializer(initializer),
            capacity=capacity,
            on_full=on_full,
            admit_after=admit_after,
            admit_probability=admit_probability,
            expire_passes=expire_passes,
            expire_seconds=expire_seconds,
            score=ShowClickScore() if score == "show_click" else score,
            disk=disk,
            dtype=_dtype(dtype),
        )
        self.location = RowLocation(location, cache_rows)  #: where the rows lie
        self.lr = self._spec.rule.lr  #: learning rate of the next update; a schedule may change it
        self._store: Callable[[], RowSource | None] = _nowhere
        self._table = name or ""

    @property
    def spec(self) -> TableSpec:
        """The table's specification; ``name`` is empty unless it was given to the constructor."""
        return self._spec

    def connect(self, table: str, store: Callable[[], RowSource | None]) -> None:
        """Set the table and the source of its rows."""
        self._table, self._store = table, store

    def forward(
        self, ids: Tensor | Packed, weights: Tensor | Packed | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """Return a row for every id, ``[*ids.shape, dim]``, or with a combiner a row for every bag.

        Bags are the last dimension of ``ids``; with 1-D ids they begin at ``offsets``. ``Packed`` ids are ragged bags,
        one a sample, and have ``Packed`` weights.
        """
        if isinstance(ids, Packed):
            ids, weights, offsets = _ragged(ids, weights)
        assert not isinstance(weights, Packed)
        store = self._store()
        if store is None:
            raise UsageError(
                f"the table of this SparseEmbedding({self.dim}) does not exist yet; give the model to "
                "echelon.distribute() before calling it"
            )
        if self.combiner is None and (weights is not None or offsets is not None):
            raise UsageError("weights and offsets are for bags; give SparseEmbedding a combiner ('sum', 'mean', ...)")
        if offsets is None or self._spec.score is None:
            rows, inverse = store.lookup(self._table, ids)
        else:
            rows, inverse = store.lookup(self._table, ids, offsets)
        if self.combiner is None:
            found = _rows_at(rows, inverse).view(*ids.shape, self.dim)
            return found if self.padding_id is None else found * (ids != self.padding_id).unsqueeze(-1)
        return self._bags(rows, inverse, ids, weights, offsets)

    def _bags(
        self, rows: Tensor, inverse: Tensor | None, ids: Tensor, weights: Tensor | None, offsets: Tensor | None
    ) -> Tensor:
        starts, shape = _starts(ids, offsets)
        if inverse is None:
            inverse = torch.arange(ids.numel(), device=rows.device)
        each = torch.ones(ids.numel(), device=rows.device) if weights is None else _flat_weights(weights, ids)
        if self.padding_id is not None:
            each = each * (ids.reshape(-1) != self.padding_id)
        total = F.embedding_bag(inverse, rows, starts, mode="sum", per_sample_weights=each)
        if self.combiner != "sum":
            size = each if self.combiner == "mean" else each * each
            one = torch.ones(1, 1, device=rows.device)
            summed = F.embedding_bag(torch.zeros_like(inverse), one, starts, mode="sum", per_sample_weights=size)
            norm = summed if self.combiner == "mean" else summed.sqrt()
            total = total / torch.where(norm == 0, torch.ones_like(norm), norm)  # an empty bag is zero
        return total.view(*shape, self.dim)

    def extra_repr(self) -> str:
        how = f", combiner={self.combiner}" if self.combiner else ""
        return f"{self.dim}, table={self._table!r}, {type(self._spec.rule).__name__.lower()}{how}"


class _GatherRows(torch.autograd.Function):
    """``rows[inverse]``, because torch's own backward of it takes four times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor) -> Tensor:
        from echelon.parameter_server.table import expand

        ctx.inverse, ctx.count = inverse, len(rows)
        return torch.from_numpy(expand(rows.detach().numpy(), inverse.numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from echelon.parameter_server.table import add_rows

        grad = grads[0].float().contiguous()
        return torch.from_numpy(add_rows(grad.numpy(), ctx.inverse.numpy(), ctx.count)), None


def _rows_at(rows: Tensor, inverse: Tensor | None) -> Tensor:
    if inverse is None:
        return rows
    if rows.device.type != "cpu" or torch.compiler.is_exporting():
        return F.embedding(inverse, rows)
    found: Tensor = _GatherRows.apply(rows, inverse)  # type: ignore[no-untyped-call]
    return found


def _once(option: str, given: Any, ours: dict[str, Any]) -> Any:
    """Return an option that was given under one of its names. Raises ``UsageError`` if two names conflict."""
    if option not in ours or given in (None, ours[option]):
        return ours.get(option, given)
    raise UsageError(
        f"SparseEmbedding({option}={given!r}): another name for it was given as {ours[option]!r}; say it once"
    )


def _nowhere() -> RowSource | None:
    return None


def _ragged(ids: Packed, weights: Tensor | Packed | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the ids of all bags, without what fills up their row, their weights, and where each bag begins."""
    begins = ids.begins.long()
    used = int(ids.offsets[ids.samples])
    if isinstance(weights, Packed):
        weights = weights.values[:used]
    return ids.values[:used], weights, begins


def _starts(ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """Return the start of each bag among the flat ids, and the shape of one value per bag."""
    if offsets is not None:
        if ids.dim() != 1 or offsets.dim() != 1:
            raise DataError(f"offsets go with 1-D ids, got ids of shape {tuple(ids.shape)}")
        return offsets, (len(offsets),)
    if ids.dim() < 2:
        raise DataError("bags are the last dimension of ids; 1-D ids need offsets")
    bags, size = math.prod(ids.shape[:-1]), ids.shape[-1]  # Size.numel() would fix the batch of a torch.export
    return torch.arange(bags, device=ids.device) * size, tuple(ids.shape[:-1])


def _flat_weights(weights: Tensor, ids: Tensor) -> Tensor:
    if weights.shape != ids.shape:
        raise DataError(f"weights have shape {tuple(weights.shape)}, ids {tuple(ids.shape)}; they must be the same")
    return weights.reshape(-1)


def _rule(given: Rule | str) -> Rule:
    if not isinstance(given, str):
        return given
    if given not in NAMED:
        raise UsageError(f"SparseEmbedding has no optimizer '{given}'{nearest(given, NAMED)}")
    return NAMED[given]


def _dtype(given: str | torch.dtype | None) -> RowDtype:
    name = "float32" if given is None else str(given).rpartition(".")[2]
    if name not in _DTYPES:
        raise UsageError(
            f"SparseEmbedding(dtype={given!r}): expected 'float32', 'bf16' or 'int8'{nearest(name, _DTYPES)}"
        )
    return _DTYPES[name]


def _initializer(given: Initializer | float | None) -> Initializer:
    if given is None:
        return Initializer()
    if isinstance(given, int | float):
        return Initializer(low=-float(given), high=float(given)) if given else Initializer(kind="constant", low=0.0)
    return given


def tables_of(model: nn.Module, seed_of: Callable[[str], int]) -> dict[str, tuple[TableSpec, list[Any]]]:
    """Return the tables of a model by name, each with the modules that read it.

    Raises ``UsageError`` if modules of one name describe different tables.
    """
    import dataclasses

    found: dict[str, tuple[TableSpec, list[Any]]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, SparseEmbedding):
            continue
        name = module.spec.name or path or "embedding"
        spec = dataclasses.replace(module.spec, name=name, seed=seed_of(name))
        if name in found and (found[name][0] != spec or found[name][1][0].location != module.location):
            raise UsageError(
                f"two SparseEmbeddings describe the table '{name}' differently; make them equal, or rename one"
            )
        found.setdefault(name, (spec, []))[1].append(module)
    return found


def locations_of(tables: Mapping[str, tuple[TableSpec, list[Any]]]) -> dict[str, RowLocation]:
    """Return where the rows of each table lie."""
    return {name: modules[0].location for name, (_, modules) in tables.items()}
