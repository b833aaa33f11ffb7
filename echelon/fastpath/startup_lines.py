"""Log lines on the fast path for the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.strategy.fastpath_choice import WHOLE, FastPathChoice


def lines(chosen: FastPathChoice) -> Iterator[str]:
    """Yield a line with the parts that are on, and one line for each part that is left out."""
    if chosen.any:
        yield f"fast: {'; '.join(_parts(chosen))}; Strategy(fast=False) switches it off"
    for part, reason in chosen.left_out.items():
        yield f"fast: {part} left out: {reason}"


def _parts(chosen: FastPathChoice) -> Iterator[str]:
    if chosen.compiled:
        yield f"compiled {_what(chosen.compiled)}"
    if chosen.bf16:
        yield "bf16 (Strategy(amp=False) keeps fp32)"
    if chosen.channels_last:
        yield "channels last"
    if chosen.padded:
        yield f"padded {', '.join(chosen.padded)}"
    if chosen.fused:
        yield f"fused {', '.join(dict.fromkeys(chosen.fused.values()))}"
    if chosen.graphs:
        yield "CUDA graphs where the host holds up the step"


def _what(names: tuple[str, ...]) -> str:
    if names == (WHOLE,):
        return "the whole model"
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    count = f"{len(names)} block{'' if len(names) == 1 else 's'}"
    return f"{count} of {', '.join(f'{parent}.*' if parent else '*' for parent in parents)}"
