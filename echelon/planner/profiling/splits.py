"""Search for the modules that tensor parallelism should split, by trial runs on fake tensors.

Transformer layers, attention, MoE and chains with two linear layers are split as a whole. Other linear layers are split
in pairs in which a column-parallel layer passes its parts to a row-parallel one, through any code between them.
Embeddings and heads are split if the vocabulary is large. A layer whose output would only be gathered again is not
split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from echelon.base.errors import EchelonError
from echelon.nn.moe import MoE
from echelon.parallel.tensor import ShardedActivation, why_not
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_step import FakePass
from echelon.strategy.annotations.marks import Split, within

Marks = dict[str, Split]
#: Runs the model as one of two ranks with these marks, and calls the function of each named module with its input.
Try = Callable[[Marks, dict[str, Callable[[Any], None]]], FakePass]

#: Smallest vocabulary to split: a smaller table costs less unsplit than a collective.
MANY_WORDS = 4096
#: Largest size of the split axis.
MOST = 64
_COLUMN, _ROW = Split(how="column"), Split(how="row")
_HEADS = ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads", "kv_heads", "num_kv_heads", "nhead")


def find_marks(model: nn.Module, like: dict[str, str], attempt: Try) -> Marks:
    """Return the marks of the modules to split.

    like:    for each unit that equals an earlier one, the name of that one
    attempt: function that runs the model with marks
    """
    whole = dict(_wholes(model, "", like))
    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    loose = {name: module for name, module in _loose(model, "", whole, like) if uses[id(module.weight)] == 1}
    marks: Marks = {name: Split() for name in whole}
    marks |= {name: _ROW if row else _COLUMN for name, row in _pairs(loose, attempt, marks).items()}
    marks |= _words(model, like, marks, attempt)
    return marks | {
        name.replace(first, other, 1): mark
        for other, first in like.items()
        for name, mark in marks.items()
        if within(name, first)
    }


def _is_new(name: str, like: dict[str, str]) -> bool:
    return not any(within(name, other) for other in like)


def _wholes(module: nn.Module, prefix: str, like: dict[str, str]) -> Iterator[tuple[str, nn.Module]]:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, MoE)
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if not _is_new(name, like):
            continue
        if (isinstance(child, kinds) or _has_pair(child)) and why_not(child) is None:
            yield name, child
        else:
            yield from _wholes(child, f"{name}.", like)


def _has_pair(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential):
        return False
    linears = [at for at, child in enumerate(module) if isinstance(child, nn.Linear)]
    plain = all(not any(child.children()) for child in module)
    return plain and any(_nothing_but_pointwise(module, first, second) for first, second in pairwise(linears))


def _nothing_but_pointwise(chain: nn.Sequential, first: int, second: int) -> bool:
    return all(not any(True for _ in chain[at].parameters()) for at in range(first + 1, second))


def _loose(
    module: nn.Module, prefix: str, whole: dict[str, nn.Module], like: dict[str, str]
) -> Iterator[tuple[str, nn.Linear]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if name in whole or not _is_new(name, like):
            continue
        if isinstance(child, nn.Linear):
            if why_not(child) is None:
                yield name, child
        else:
            yield from _loose(child, f"{name}.", whole, like)


# ---- pairs of linear layers ----


def _pairs(loose: dict[str, nn.Linear], attempt: Try, marks: Marks) -> dict[str, bool]:
    """Return, by name of a linear layer, True if it is row-parallel, False if it is column-parallel."""
    wanted = dict.fromkeys(loose, False)
    order: list[str] = []
    for _ in range(8):
        fed: dict[str, bool] = {}
        order = []

        def note_call(name: str, x: Any, fed: dict[str, bool] = fed, order: list[str] = order) -> None:
            order.append(name)
            fed.setdefault(name, isinstance(x, ShardedActivation) and x.along == x.dim() - 1)

        tried = {name: _ROW if row else _COLUMN for name, row in wanted.items()}
        if not _works(attempt, marks | tried, {name: _telling(note_call, name) for name in wanted}):
            return {}
        rows = next((name for name in dict.fromkeys(order) if fed[name] and not wanted[name]), None)
        if rows is None:
            break
        wanted[rows] = True
    return _kept(list(dict.fromkeys(order)), wanted, attempt, marks)


def _telling(note_call: Callable[[str, Any], None], name: str) -> Callable[[Any], None]:
    return lambda x: note_call(name, x)


def _kept(order: list[str], wanted: dict[str, bool], attempt: Try, marks: Marks) -> dict[str, bool]:
    """Return the sets of column-parallel layers up to a row-parallel one that need no all-gather."""
    found: dict[str, bool] = {}
    waiting: list[str] = []
    for name in order:
        waiting.append(name)
        if wanted[name]:
            family = [one for one in waiting if _parent(one) == _parent(name)] or waiting
            pair = {one: wanted[one] for one in family}
            tried = marks | {one: _ROW if row else _COLUMN for one, row in pair.items()}
            if len(pair) > 1 and not _gathers(attempt, tried):
                found |= pair
            waiting = []
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _works(attempt: Try, marks: Marks, hooks: dict[str, Callable[[Any], None]]) -> FakePass | None:
    try:
        return attempt(marks, hooks)
    except EchelonError:
        return None


def _gathers(attempt: Try, marks: Marks) -> bool:
    """Return True if the model fails with these marks or all-gathers a split tensor in forward."""
    passed = _works(attempt, marks, {})
    return passed is None or messages(passed).get("all_gather", 0) > 0


def messages(passed: FakePass) -> dict[str, int]:
    """Count the collectives of all units in forward, by kind."""
    found: dict[str, int] = {}
    for span in (*(span for call in passed.calls for span in (call.outer, call.measured.unit)), passed.tail):
        for kind, _ in span.messages:
            found[kind] = found.get(kind, 0) + 1
    return found


# ---- vocabulary ----


def _words(model: nn.Module, like: dict[str, str], marks: Marks, attempt: Try) -> Marks:
    """Return marks for large embeddings and output heads; modules that share a weight are split only together."""
    modules = {name: module for name, module in model.named_modules() if name not in marks and _is_new(name, like)}
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    heads = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    found: Marks = {}
    for name, table in embeddings.items():
        tied = [n for n, m in heads.items() if m.weight is table.weight]
        if table.num_embeddings >= MANY_WORDS and why_not(table) is None:
            found |= _if_it_works({name: Split(), **{each: Split() for each in tied}}, marks | found, attempt)
    for name, head in heads.items():
        inside = any(within(name, other) for other in (*marks, *found))
        if head.out_features >= MANY_WORDS * 4 and not inside and why_not(head) is None:
            found |= _if_it_works({name: Split()}, marks | found, attempt)
    return found


def _if_it_works(more: Marks, marks: Marks, attempt: Try) -> Marks:
    """Return the additional marks if the model runs with them and gathers no full logits, otherwise no marks.

    With a loss that the runtime supports, ranks exchange only a few numbers per row of the logits.
    """
    passed = _works(attempt, marks | more, {})
    if passed is None:
        return {}
    large = any(size > 16 * _rows(passed) for kind, size in passed.tail.messages if kind == "all_gather")
    return {} if large else more


def _rows(passed: FakePass) -> float:
    """Return an upper estimate of the bytes of one number per row of the loss."""
    return 64.0 * max((size for _, size in passed.calls[0].inputs), default=1.0) if passed.calls else 64.0


# ---- size of the split axis ----


def most(model: nn.Module, marks: Marks) -> int:
    """Return the largest power of two that divides all split dimensions: heads, and features between two layers."""
    return max(size for size in _powers() if all(_divides(model, name, mark, size) for name, mark in marks.items()))


def _powers() -> list[int]:
    return [2**power for power in range(MOST.bit_length())]


def _divides(model: nn.Module, name: str, mark: Split, size: int) -> bool:
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear) and mark.how in ("column", "row"):
        cut = module.in_features if mark.how == "row" else module.out_features
        return cut % size == 0 and _heads_divide(model.get_submodule(_parent(name)), size)
    parts = [module, *module.modules()]
    return all(_heads_divide(part, size) for part in parts if isinstance(part, nn.MultiheadAttention))


def _heads_divide(module: nn.Module, size: int) -> bool:
    counts = [getattr(module, name, None) for name in _HEADS]
    return all(count % size == 0 for count in counts if isinstance(count, int) and count > 0)


def add_input_hooks(shadow: FakeModel, hooks: dict[str, Callable[[Any], None]]) -> None:
    """Register hooks that call the function of each named module with the module's input."""
    for name, hook in hooks.items():
        shadow.model.get_submodule(name).register_forward_pre_hook(lambda _, args, hook=hook: hook(args[0]))
