"""Match exclude patterns against parameter names; every option that leaves parameters out uses this rule.

A pattern is part of a parameter's name ("embed"), or a kind of module, which matches all parameters of such modules
("batch_norm"), or "bias" (also ".b_0", the name of biases in PaddlePaddle).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from echelon.base.errors import UsageError

# Classes are matched by name, because many models define their own layer norms.
KINDS = {
    "batch_norm": "BatchNorm",
    "layer_norm": "LayerNorm",
    "group_norm": "GroupNorm",
    "instance_norm": "InstanceNorm",
}
BIASES = ("bias", ".b_0")


def excluded_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the parameters that match any of the ``patterns``, in the order of the model.

    model:    torch module
    patterns: parts of names, or 'bias', 'batch_norm', 'layer_norm', ...

    >>> names = echelon.optim.excluded_names(model, ["bias", "layer_norm"])
    """
    if isinstance(patterns, str):
        raise UsageError(f"exclude takes a list of patterns, got {patterns!r}; write [{patterns!r}]")
    matched: set[str] = set()
    for pattern in patterns:
        found = set(_matches(model, pattern))
        if not found:
            raise UsageError(f"exclude pattern {pattern!r} matches no parameter{_suggestion(model, pattern)}")
        matched |= found
    return [name for name, _ in model.named_parameters() if name in matched]


def _matches(model: nn.Module, pattern: str) -> Iterator[str]:
    """Yield the first name of each matching parameter; a tied parameter matches by any of its names."""
    if not isinstance(pattern, str) or not pattern:
        raise UsageError(f"exclude takes patterns that are part of a name, got {pattern!r}")
    first = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules(remove_duplicate=False):
        of_kind = pattern in KINDS and _is_a(module, KINDS[pattern])
        for own, parameter in module.named_parameters(prefix=path, recurse=False, remove_duplicate=False):
            if of_kind or pattern in own or (pattern in BIASES and "bias" in own.rpartition(".")[2]):
                yield first[parameter]


def _is_a(module: nn.Module, class_name: str) -> bool:
    return any(class_name in kind.__name__ for kind in type(module).__mro__)


def _suggestion(model: nn.Module, pattern: str) -> str:
    names = [name for name, _ in model.named_parameters()]
    kinds = [word for word, kind in KINDS.items() if any(_is_a(module, kind) for module in model.modules())]
    words = dict.fromkeys([*kinds, *_parts(names), *names])
    close = difflib.get_close_matches(pattern, words, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    shown = [*kinds, *names[:4], *(["..."] if len(names) > 4 else [])]
    return f"; there are {', '.join(shown)}"


def _parts(names: Iterable[str]) -> list[str]:
    """Return the parts that names consist of: ``layers``, ``norm1``, ``weight``."""
    return [part for name in names for part in name.split(".") if not part.isdigit()]
