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

from torch import nn

from echelon.base.errors import EchelonError
from echelon.nn.moe import MoE
from echelon.parallel.expert.split_stacked_experts import has_stacked_experts
from echelon.parallel.tensor import why_not
from echelon.parallel.tensor.split_spec import part_widths
from echelon.parallel.tensor.transposed_linear import is_transposed_linear
from echelon.planner.profiling.fake_step import FakePass
from echelon.planner.profiling.layer_probe import LayerProbe
from echelon.strategy.annotations.marks import Split, within

Marks = dict[str, Split]
#: Runs the model as one of the ranks with these marks, and notes what the probe watches.
Try = Callable[[Marks, LayerProbe | None], FakePass]

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
    marks |= _pairs(loose, attempt, marks)
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
        if (isinstance(child, kinds) or _has_pair(child) or has_stacked_experts(child)) and why_not(child) is None:
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
) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if name in whole or not _is_new(name, like):
            continue
        if isinstance(child, nn.Linear) or is_transposed_linear(child):
            if why_not(child) is None:
                yield name, child
        else:
            yield from _loose(child, f"{name}.", whole, like)


# ---- pairs of linear layers ----

#: Most trial runs until the set of row-parallel layers stays as it is.
TRIALS = 8


def _pairs(loose: dict[str, nn.Module], attempt: Try, marks: Marks) -> Marks:
    """Return the marks of column-parallel layers that pass their parts to row-parallel ones, and of those."""
    wanted = dict.fromkeys(loose, _COLUMN)
    probe = LayerProbe(list(loose))
    for _ in range(TRIALS):
        probe = LayerProbe(list(loose))
        if not _works(attempt, marks | wanted, probe):
            return {}
        changes = {name: mark for name, mark in _fitting(probe).items() if wanted[name].how != mark.how or mark.parts}
        changes = {name: mark for name, mark in changes.items() if wanted[name] != mark}
        if not changes:
            break
        wanted |= changes
    return _kept(probe.order, wanted, attempt, marks)


def _fitting(probe: LayerProbe) -> Marks:
    """Return the marks that fit the inputs and the uses of the outputs seen in a trial run."""
    return {name: _ROW if name in probe.fed else _column_of(probe.parts.get(name)) for name in probe.order}


def _column_of(parts: tuple[int, ...] | None) -> Split:
    if parts is None:
        return _COLUMN
    return Split(how="column", parts=len(parts) if len(set(parts)) == 1 else parts)


def _kept(order: list[str], wanted: Marks, attempt: Try, marks: Marks) -> Marks:
    """Return the sets of column-parallel layers up to a row-parallel one that need no all-gather."""
    groups = list(_groups(order, wanted))
    together = {name: wanted[name] for group in groups for name in group}
    if not groups or not _gathers(attempt, marks | together):
        return together
    found: Marks = {}
    for group in groups:
        found |= _without_gather(group, wanted, attempt, marks)
    return found


def _groups(order: list[str], wanted: Marks) -> Iterator[list[str]]:
    """Yield each row-parallel layer with the column-parallel ones called since the one before it."""
    waiting: list[str] = []
    for name in order:
        waiting.append(name)
        if wanted[name].how == "row":
            if len(waiting) > 1:
                yield waiting
            waiting = []


def _without_gather(group: list[str], wanted: Marks, attempt: Try, marks: Marks) -> Marks:
    """Return the marks of the group, or of less of it, that need no all-gather: siblings alone, the widest alone."""
    *columns, row = group
    siblings = [name for name in columns if _parent(name) == _parent(row)]
    widest = [name for name in columns if wanted[name] == _COLUMN]
    for chosen in (columns, siblings, widest[:1]):
        pair = {name: wanted[name] for name in (*chosen, row)}
        if chosen and not _gathers(attempt, marks | pair):
            return pair
    return {}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _works(attempt: Try, marks: Marks, probe: LayerProbe | None = None) -> FakePass | None:
    try:
        return attempt(marks, probe)
    except EchelonError:
        return None


def _gathers(attempt: Try, marks: Marks) -> bool:
    """Return True if the model fails with these marks or all-gathers a split tensor in forward."""
    passed = _works(attempt, marks)
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
    passed = _works(attempt, marks | more)
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
    if mark.how in ("column", "row") and (isinstance(module, nn.Linear) or is_transposed_linear(module)):
        return all(width % size == 0 for width in _cut_widths(module, mark)) and _heads_divide(
            model.get_submodule(_parent(name)), size
        )
    parts = [module, *module.modules()]
    return all(_heads_divide(part, size) for part in parts if isinstance(part, nn.MultiheadAttention))


def _cut_widths(layer: nn.Module, mark: Split) -> tuple[int, ...]:
    """Return the widths that are divided over the ranks: inputs of a row split, the parts of the outputs of others."""
    weight = layer.get_parameter("weight")
    outputs, inputs = weight.t().shape if is_transposed_linear(layer) else weight.shape
    return (inputs,) if mark.how == "row" else part_widths(outputs, mark)


def _heads_divide(module: nn.Module, size: int) -> bool:
    counts = [getattr(module, name, None) for name in _HEADS]
    return all(count % size == 0 for count in counts if isinstance(count, int) and count > 0)
