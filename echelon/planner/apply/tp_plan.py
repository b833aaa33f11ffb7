"""Marks from a tensor-parallel plan that a model brings along, as models of Hugging Face transformers do.

A plan names a style for each pattern of modules: ``{"layers.*.self_attn.q_proj": "colwise"}``. A model has it as
``tp_plan``, and the configuration of a base model as ``base_model_tp_plan``. Styles about gradients and layouts of
activations need no mark, because split layers return activations that look whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from echelon.strategy.annotations.marks import Split

_COLUMN, _ROW = Split(how="column"), Split(how="row")
#: Style of a plan -> mark.
STYLES: dict[str, Split] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), _COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), _ROW),
    "packed_colwise": Split(how="column", parts=2),
    "embedding_rowwise": Split(),
    "embedding_colwise": _COLUMN,
    "moe_tp_experts": Split(),
}
#: Styles that need no mark: their modules stay whole, and what they compute is exact.
WITHOUT_MARK = {
    *("replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "sequence_parallel", "local_params"),
    *("replicate", "moe_identity_expert"),
}


class FoundPlan(NamedTuple):
    """A tensor-parallel plan of a model.

    origin:  name of the object that has it
    marks:   marks by module
    unknown: modules with a style that has no mark, and the style
    """

    origin: str
    marks: dict[str, Split]
    unknown: dict[str, str]


def read_plan(model: nn.Module) -> FoundPlan | None:
    """Return the plan of the outermost modules that have one, in marks; None if there is none."""
    origins, marks, unknown = [], {}, dict[str, str]()
    for prefix, module, origin, plan in _plans(model, ""):
        origins.append(origin)
        styles = dict(_styles(module, plan))
        for own, style in styles.items():
            name = f"{prefix}{own}"
            if style in STYLES:
                marks[_wrapped(model, name)] = STYLES[style]
            elif style not in WITHOUT_MARK:
                unknown[name] = style
    return FoundPlan(" and ".join(dict.fromkeys(origins)), marks, unknown) if marks else None


def _plans(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, Mapping[str, str]]]:
    plan: Any = getattr(module, "_tp_plan", None)
    origin = f"{type(module).__name__}.tp_plan"
    if not plan:
        config = getattr(module, "config", None)
        plan, origin = getattr(config, "base_model_tp_plan", None), f"{type(config).__name__}.base_model_tp_plan"
    if isinstance(plan, Mapping) and any(True for _ in _styles(module, plan)):
        yield prefix, module, origin, plan
        return
    for name, child in module.named_children():
        yield from _plans(child, f"{prefix}{name}.")


def _styles(module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the modules inside that the plan names, and their styles; ``*`` stands for one part of a name."""
    patterns = [(re.compile(_as_regex(pattern)), style) for pattern, style in plan.items()]
    for name, _ in module.named_modules():
        for pattern, style in patterns:
            if name and pattern.fullmatch(name):
                yield name, style


def _as_regex(pattern: str) -> str:
    return r"[^.]+".join(map(re.escape, pattern.split("*")))


def _wrapped(model: nn.Module, name: str) -> str:
    """Return the name of the layer inside an adapter, which keeps the original as ``base_layer``."""
    inside = getattr(model.get_submodule(name), "base_layer", None)
    return f"{name}.base_layer" if isinstance(inside, nn.Module) else name
