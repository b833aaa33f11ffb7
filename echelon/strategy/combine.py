"""The table of option pairs of a Strategy that conflict or change each other; all other pairs combine freely.

A CombinationChange is allowed, but one of the two options does not behave exactly as it does alone; ``explain`` prints
how. A Conflict raises UsageError when the Strategy is created, before training starts.

Names are those of the options of Strategy. If only one value of an option matters, the name includes it: ``amp=fp16``,
``reduction.op=sum``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from echelon.base.errors import UsageError
from echelon.strategy.parts import SHORTHAND

if TYPE_CHECKING:
    from echelon.strategy.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class CombinationChange:
    """An allowed combination that changes the behavior of an option; ``how`` describes the change."""

    how: str


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A refused combination: the reason (``why``) and the remedy (``do``)."""

    why: str
    do: str


Verdict = CombinationChange | Conflict

_ONE_OF_TWO = "choose one of the two"
#: Tables in the workers, beside which more is possible than beside servers, named "ps".
COLLECTIVE = "ps=collective"

_AMONG_ALL: dict[tuple[str, str], Verdict] = {
    ("lars", "lamb"): Conflict("each is the optimizer", "choose lars for SGD models or lamb for Adam models"),
    ("lars", "dgc"): Conflict(
        "DGC sends parts of several steps at once, LARS needs the norm of one step's whole gradient",
        "drop lars, or use fp16_allreduce in place of dgc",
    ),
    ("lamb", "dgc"): Conflict(
        "DGC's momentum correction is that of SGD, LAMB steps as Adam does",
        "drop lamb, or use fp16_allreduce in place of dgc",
    ),
    ("localsgd", "adaptive_localsgd"): Conflict("both say when to average", _ONE_OF_TWO),
    ("amp=fp16", "dgc"): CombinationChange(
        "gradients are unscaled and checked on all ranks before they enter the residuals, which stay fp32; an overflow "
        "anywhere skips the step everywhere and leaves the residuals as they were"
    ),
    ("amp=fp16", "fp16_allreduce"): CombinationChange(
        "gradients travel with the loss scale still on; an overflow arrives as one and skips the step everywhere"
    ),
    ("dgc", "gradient_merge"): CombinationChange("the merged gradient of several steps is compressed and sent once"),
    ("dgc", "fp16_allreduce"): CombinationChange(
        "values, not positions, travel in 16 bits; the rounding stays in the residual"
    ),
    ("dgc", "clip"): CombinationChange(
        "each rank clips its own gradient to clip / sqrt(ranks) before it accumulates, instead of the mean afterwards"
    ),
    ("recompute", "sync_batch_norm"): CombinationChange(
        "batch norms in recomputed parts exchange their statistics twice"
    ),
    ("lars", "clip"): CombinationChange(
        "clipping comes first, and LARS undoes most of it: its rate divides by the gradient's norm"
    ),
    ("lamb", "clip"): CombinationChange(
        "clipping comes first, and LAMB ignores a constant scale: clipping only gives this step less weight in "
        "the moments"
    ),
    ("lars", "lr_scaling"): CombinationChange(
        "the trust ratio adapts each layer's rate already; the scaled rate multiplies it"
    ),
    ("lamb", "lr_scaling"): CombinationChange(
        "the trust ratio adapts each layer's rate already; LAMB's authors scale by the root: lr_scaling='sqrt'"
    ),
    ("gradient_merge", "lr_scaling"): CombinationChange(
        "the rate is scaled by ranks x merged steps, as the update's batch is"
    ),
    ("lr_scaling", "reduction.op=sum"): CombinationChange(
        "summed gradients grow with the ranks and the rate does too; scaling it once is usually meant: op='mean'"
    ),
}

_WITH_LOCAL_STEPS: dict[str, Verdict] = {
    "dgc": Conflict("ranks step alone and send no gradients to compress", _ONE_OF_TWO),
    "sync_batch_norm": Conflict(
        "statistics over all replicas would make every rank wait at every layer",
        "leave sync_batch_norm unset: then they are per replica and averaged at each sync",
    ),
    "lr_scaling": Conflict(
        "each update sees one replica's batch, there is no larger one to scale for",
        "drop lr_scaling and set the optimizer's rate",
    ),
    "reduction.op=sum": Conflict("weights are averaged and no gradients are summed", "leave op='mean'"),
    "amp=fp16": CombinationChange(
        "an overflow skips the step of that rank only; the smallest scale is agreed on at each sync"
    ),
    "clip": CombinationChange("each rank clips its own gradient"),
    "gradient_merge": CombinationChange("k counts updates, each of them after so many merged steps"),
    "fp16_allreduce": CombinationChange(
        "the change of the weights since the last sync travels in 16 bits, not gradients"
    ),
    "lars": CombinationChange("trust ratios come from each rank's own gradient"),
    "lamb": CombinationChange("trust ratios come from each rank's own gradient"),
}

BESIDE_AUTO = Conflict(
    "auto decides by itself how the model is trained", "remove auto, or the options and marks beside it"
)

#: Options beside splits and stages, which marks on the model (named "split" and "pipeline") or the options ``split``
#: and ``stages`` ask for.
_WITH_MARKS: dict[str, Verdict] = {
    "dgc": Conflict("the largest entries are chosen among whole parameters", "drop dgc, or the marks"),
    "localsgd": Conflict("replicas that step alone are whole models on one device", "drop localsgd, or the marks"),
    "adaptive_localsgd": Conflict(
        "replicas that step alone are whole models on one device", "drop adaptive_localsgd, or the marks"
    ),
    "ps": Conflict("workers of a parameter server run whole models", "drop ps, or the marks"),
    COLLECTIVE: Conflict("workers with sparse tables run whole models", "drop the marks, or the tables"),
    "auto": BESIDE_AUTO,
    "low_memory": Conflict("low_memory trains whole models on one device", "drop low_memory, or the marks"),
}

_WITH_SHARD: dict[str, Verdict] = {
    "dgc": Conflict("each rank keeps residuals of whole gradients", "choose one of the two"),
    "localsgd": Conflict("each rank steps with a whole optimizer of its own", "choose one of the two"),
    "adaptive_localsgd": Conflict("each rank steps with a whole optimizer of its own", "choose one of the two"),
    "fp16_allreduce": Conflict("gradients are scattered, not all-reduced", "choose one of the two"),
    "gradient_merge": CombinationChange(
        "with levels 2 and 3 every merged step is scattered at once, so that no rank holds a whole gradient; level 1 "
        "sends once"
    ),
    "lars": CombinationChange("norms of parameters are summed over their shards: one small message an update"),
    "lamb": CombinationChange("norms of parameters are summed over their shards: one small message an update"),
}

_NO_GRADIENTS_BETWEEN = "gradients go to servers, none travel between workers"

_WITH_SERVERS: dict[str, Verdict] = {
    "dgc": Conflict(_NO_GRADIENTS_BETWEEN, "drop dgc; ps='geo' also sends less"),
    "localsgd": Conflict("both say how workers come together", "choose one of the two; ps='geo' is similar"),
    "adaptive_localsgd": Conflict("both say how workers come together", "choose one of the two; ps='geo' is similar"),
    "shard": Conflict("servers hold parameters and optimizer state already", "drop shard"),
    "gradient_merge": Conflict("every step is one push", "use a larger batch in place of gradient_merge"),
    "lr_scaling": Conflict("servers step with the rates that workers send", "drop lr_scaling and set the rates"),
    "reduction.op=sum": Conflict("servers take the mean", "leave op='mean'"),
    "amp=fp16": CombinationChange(
        "an overflow skips the push of that worker only; with dense='allreduce' it skips it everywhere"
    ),
    "clip": CombinationChange(
        "each worker clips its own dense gradient before the push; rows of tables are not clipped"
    ),
    "recompute": CombinationChange("rows are read once and used in both passes; the push is the same as without"),
    "fp16_allreduce": CombinationChange(
        "only dense parameters that workers sum among themselves (dense='allreduce') travel so"
    ),
    "sync_batch_norm": CombinationChange("needs dense='allreduce', where workers talk to one another"),
    "lars": CombinationChange("each parameter lies whole on one server, which sees all of it"),
    "lamb": CombinationChange("each parameter lies whole on one server, which sees all of it"),
}

#: Options beside tables in the workers: dense parameters are trained as without tables.
_WITH_COLLECTIVE_TABLES: dict[str, Verdict] = {
    "dgc": Conflict(
        "rows are updated exactly in each step, DGC delays gradients", "drop dgc, or use fp16_allreduce in its place"
    ),
    "localsgd": Conflict("workers share the rows of every step", "drop localsgd, or use ps='geo'"),
    "adaptive_localsgd": Conflict("workers share the rows of every step", "drop adaptive_localsgd, or use ps='geo'"),
    "reduction.op=sum": Conflict("tables take the mean", "leave op='mean'"),
    "lr_scaling": CombinationChange("only rates of dense parameters are scaled; tables step with their own"),
    "clip": CombinationChange("dense gradients are clipped; rows of tables are not"),
    "amp=fp16": CombinationChange("an overflow anywhere skips the step everywhere, also for tables"),
    "recompute": CombinationChange("rows are read once and used in both passes"),
    "gradient_merge": CombinationChange("the merged gradient of a row is applied once; rows are read for each pass"),
    "fp16_allreduce": CombinationChange("dense gradients travel in 16 bits; rows and their gradients in 32"),
}

_IN_BF16 = "low_memory computes in bf16, the form its weights have"
_STEPS_IN_BACKWARD = "each gradient is applied and freed while backward runs"

_WITH_LOW_MEMORY: dict[str, Verdict] = {
    "amp=fp16": Conflict(_IN_BF16, "use amp='bf16', or leave amp out"),
    "lars": Conflict("low_memory steps as Adam does", "choose one of the two"),
    "lamb": Conflict("low_memory steps as Adam does, without norms of whole layers", "choose one of the two"),
    "dgc": Conflict(_STEPS_IN_BACKWARD, "choose one of the two"),
    "localsgd": Conflict("averages of weights would lose their remainders", "choose one of the two"),
    "adaptive_localsgd": Conflict("averages of weights would lose their remainders", "choose one of the two"),
    "shard": Conflict("low_memory keeps its state whole, on the device and in host memory", "choose one of the two"),
    "ps": Conflict("servers hold parameters and optimizer state already", "choose one of the two"),
    COLLECTIVE: Conflict("gradients of rows come after backward, with those of all workers", "drop low_memory"),
    "gradient_merge": Conflict(_STEPS_IN_BACKWARD, "use a larger batch with recompute in place of gradient_merge"),
    "fp16_allreduce": Conflict("low_memory sums its gradients in fp32 by itself", "drop fp16_allreduce"),
    "clip": Conflict(f"{_STEPS_IN_BACKWARD}, before the norm of all is known", "drop clip, and lower the rate instead"),
}

_WITH_LORA: dict[str, Verdict] = {
    "low_memory": Conflict(
        "low_memory trains every weight, and lora freezes them",
        "drop low_memory: Lora(base_dtype='bf16') takes two bytes per frozen parameter",
    ),
    "ps": Conflict("servers hold and step the whole model", "drop ps, or the adapters"),
    "dgc": CombinationChange("only adapters of at least min_size entries are compressed; most are smaller"),
    "shard": CombinationChange("level 3 also shards the frozen weights; levels 1 and 2 shard only what adapters need"),
}

TABLE: dict[tuple[str, str], Verdict] = _AMONG_ALL | {
    (name, local): verdict for local in ("localsgd", "adaptive_localsgd") for name, verdict in _WITH_LOCAL_STEPS.items()
}
TABLE |= {(name, "shard"): verdict for name, verdict in _WITH_SHARD.items()}
TABLE |= {(name, mark): verdict for mark in ("split", "pipeline", "stages") for name, verdict in _WITH_MARKS.items()}
TABLE |= {(name, "ps"): verdict for name, verdict in _WITH_SERVERS.items()}
TABLE |= {(name, COLLECTIVE): verdict for name, verdict in _WITH_COLLECTIVE_TABLES.items()}
TABLE |= {(name, "low_memory"): verdict for name, verdict in _WITH_LOW_MEMORY.items()}
TABLE |= {(name, "lora"): verdict for name, verdict in _WITH_LORA.items()}

_EVERY_OPTION = (
    *(
        "amp",
        "amp=fp16",
        "recompute",
        "lars",
        "lamb",
        "dgc",
        "localsgd",
        "adaptive_localsgd",
        "shard",
        "ps",
        COLLECTIVE,
    ),
    *("gradient_merge", "fp16_allreduce", "clip", "lr_scaling", "sync_batch_norm", "reduction", "reduction.op=sum"),
    *("low_memory", "lora", COLLECTIVE),
)
TABLE |= {(name, "auto"): BESIDE_AUTO for name in _EVERY_OPTION}


def refuse_conflicts(strategy: Strategy, implied: Iterable[str] = ()) -> None:
    """Raise UsageError for the first pair of active options, or marks of the model, that conflict."""
    if strategy.auto and (beside := [name for name in set_options(strategy) if name != "auto"]):
        which = ", ".join(beside)  # one error names all of them
        raise UsageError(f"{which} and auto do not combine: {BESIDE_AUTO.why}; {BESIDE_AUTO.do}")
    if strategy.low_memory and strategy.amp is False:
        raise UsageError(f"amp=False and low_memory do not combine: {_IN_BF16}; leave amp out")
    for (first, second), verdict in verdicts(strategy, implied):
        if isinstance(verdict, Conflict):
            raise UsageError(f"{first} and {second} do not combine: {verdict.why}; {verdict.do}")


def verdicts(strategy: Strategy, implied: Iterable[str] = ()) -> Iterator[tuple[tuple[str, str], Verdict]]:
    """Yield the rows of the table that apply to this strategy and to the marks that the model ``implied``."""
    active = {*active_names(strategy), *implied}
    return ((pair, verdict) for pair, verdict in TABLE.items() if active.issuperset(pair))


def set_options(strategy: Strategy) -> list[str]:
    values = {field.name: (getattr(strategy, field.name), field.default) for field in dataclasses.fields(strategy)}
    requested = [name for name, (value, default) in values.items() if value is not None and value != default]
    # ``fast`` combines with every option, and ``amp=False`` only turns a default off
    return [name for name in requested if name != "fast" and not (name == "amp" and strategy.amp is False)]


def active_names(strategy: Strategy) -> Iterator[str]:
    """Yield the names of active options, and ``name=value`` or ``name.setting=value`` for each of their settings."""
    active = set_options(strategy)
    for field in dataclasses.fields(strategy):
        value: Any = getattr(strategy, field.name)
        if field.name not in active:
            continue
        # tables in the workers combine with more than servers do, so they are a name of their own
        in_workers = field.name == "ps" and value.mode == "collective"
        if not in_workers:
            yield f"{field.name}=False" if value is False else field.name
        if dataclasses.is_dataclass(value):
            for setting, choice in vars(value).items():
                is_whole = SHORTHAND.get(field.name) == setting
                yield f"{field.name}={choice}" if is_whole else f"{field.name}.{setting}={choice}"
