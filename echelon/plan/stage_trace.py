"""Finds the inputs of each pipeline stage by recording one forward pass with fake tensors.

Units are the modules with a stage. All other code in the user's forward and loss is code between units, and runs on
every stage that uses its result. So the dependencies of each stage's units (and, for the last stage, of the output and
the loss) through code between units must be known: outputs of other units, leaves of the batch, parameters outside of
units. One pass finds them: units return fake tensors, and every operation between units propagates the sources of its
operands to its results.

Sources are recorded per storage, not per tensor: views share them, and an in-place change reaches all views.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from echelon.base.config import strict
from echelon.base.errors import UsageError, nearest
from echelon.plan.called_modules import is_called
from echelon.plan.fake_forward import as_module_output, fake_forward, placeholder, side_effect_free
from echelon.plan.module_calls import call_unintercepted, install_call_hooks, intercept_module_calls
from echelon.plan.operations import InterUnitMode, IntraUnitMode, Tensors, ValueReadMode, storage_of
from echelon.plan.pytree import hides_tensors, take_apart, tensors_of


@strict
class TracedTransfer:
    """One output tensor of a unit that is sent from the stage that computes it to a stage that needs it.

    key:               "unit#call/leaf", as in "layers.3#0/0": unit, index of the call, index of the leaf in the output
    source, target:    sending and receiving stage
    changed_at_source: the source stage changes the tensor in place afterwards, so a copy must be sent
    changed_at_target: the target stage changes the tensor in place
    """

    key: str
    source: int
    target: int
    changed_at_source: bool = False
    changed_at_target: bool = False


@strict
class StageTrace:
    """The needs of each stage, found by recording one forward pass.

    units:     module name -> stage, from 0
    transfers: tensors sent between stages; skip connections go directly from their first to their last stage
    holders:   every parameter and buffer (by its first name) -> the stages that need it
    inputs:    per stage, True for each leaf of the batch that it needs
    kept:      per stage, the outputs of its own units that it needs itself
    written:   leaves of the batch that the forward changes in place
    """

    units: dict[str, int]
    transfers: tuple[TracedTransfer, ...]
    holders: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[bool, ...], ...]
    kept: tuple[tuple[str, ...], ...]
    written: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.inputs)


def record(call: Callable[[Any], Any], model: nn.Module, batch: Any, units: Mapping[str, int]) -> StageTrace:
    """Run ``call(batch)``, which runs ``model``, with fake forwards of the units, and return the needs of each stage.

    The call has no side effects: buffers, random number state, gradients and the batch are unchanged.

    call:  runs the forward and the loss on a batch; returns the loss, or outputs and the loss
    units: module name -> stage
    """
    stages = check_units(model, units)
    undo = install_call_hooks(model, stages)
    try:
        with side_effect_free(model, batch) as copied:
            recorder = _StageTracer(model, stages, tree_leaves(copied))
            with ValueReadMode(recorder), InterUnitMode(recorder), intercept_module_calls(recorder.unit_called):
                result = call(copied)
            return recorder.finish(result)
    finally:
        undo()


def check_units(model: nn.Module, units: Mapping[str, int]) -> dict[str, int]:
    """Return ``units`` with each ``ModuleList`` or ``ModuleDict`` replaced by the modules in it.

    Raises ``UsageError`` for an unknown module, a module with two stages, or a stage without a module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    result: dict[str, int] = {}
    owners: dict[nn.Module, str] = {}
    for name, stage in units.items():
        if name not in modules:
            raise UsageError(f"stage {stage}: no module is called '{name}'{nearest(name, modules)}")
        for each in _running(name, modules[name]):
            other = owners.setdefault(modules[each], each)
            if result.get(other, stage) != stage:
                raise UsageError(
                    f"'{other}' and '{each}' are one module, but have stages {result[other]} and {stage}; give it one"
                )
            if other == each:
                result[each] = stage
    for stage in range(max(result.values(), default=0) + 1):
        if stage not in result.values():
            raise UsageError(f"stage {stage} has no module; give it one, or number the stages without a gap")
    return result


def _running(name: str, module: nn.Module) -> Iterator[str]:
    if is_called(module):
        yield name
        return
    for key, child in module._modules.items():  # a ModuleList or ModuleDict is never called itself
        if child is not None:
            yield from _running(f"{name}.{key}", child)


# ---- sources of values ----


class _Source(NamedTuple):
    kind: Literal["output", "batch", "weight", "random", "change", "inner"]
    name: str
    stage: int = -1


_Sources = frozenset[_Source]
_NOTHING: _Sources = frozenset()


class _StageTracer:
    """Observes the unit calls and the operations of one pass."""

    def __init__(self, model: nn.Module, units: dict[str, int], batch: list[Any]) -> None:
        self._model, self._units, self._batch = model, units, batch
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._stages = range(max(units.values()) + 1)
        self._reached = 0  # the last stage called so far: the passes of earlier stages have ended
        self._inside: str | None = None  # the unit that is being called
        self._calls: Counter[str] = Counter()
        self._drawn = 0
        self._decisive: set[_Source] = set()  # random draws whose values control the forward
        self._needs: list[set[_Source]] = [set() for _ in self._stages]
        self._outputs: dict[str, int] = {}  # key -> the stage that computes it
        self._writers: defaultdict[str, set[int]] = defaultdict(set)  # key -> the stages that change it in place
        self._known: dict[StorageWeakRef, _Sources] = {}
        self._born: dict[StorageWeakRef, str] = {}  # storage created for an output -> key of the output
        self._inner: dict[StorageWeakRef, _Sources] = {}  # storage created inside a unit -> that unit
        for name, value in _named_tensors(model):
            self._add(value, {_Source("weight", name)})
        for at, leaf in enumerate(batch):
            if isinstance(leaf, Tensor):
                self._add(leaf, {_Source("batch", str(at))})
        self._buffers = dict(model.named_buffers())
        self._names = {storage_of(value): name for name, value in self._buffers.items()}
        self._fed: dict[str, int] = {}  # buffer changed in place between units -> the last stage called before that
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in batch]

    # ---- operations ----

    def computed(self, results: Tensors, operands: Tensors, written: Tensors, draw: str | None) -> None:
        sources = self._sources(operands)
        if draw:
            self._drawn += 1
            sources |= {_Source("random", f"{draw}@{self._drawn}")}
        for tensor in written:
            if key := self._born.get(storage_of(tensor)):
                self._writers[key].update(self._stages[self._reached :])  # all stages from here on run this code
            if name := self._names.get(storage_of(tensor)):
                self._fed[name] = self._reached
        for tensor in (*results, *written):
            self._add(tensor, sources)

    def used(self, unit: str, operands: Tensors, written: Tensors) -> None:
        stage = self._units[unit]
        self._needs[stage] |= self._sources(operands)
        for tensor in written:
            if self._known.get(storage_of(tensor)):  # not created by the unit: other code may use it afterwards
                self._add(tensor, {_Source("change", unit, stage)})
            if key := self._born.get(storage_of(tensor)):
                self._writers[key].add(stage)

    def made_inside(self, unit: str, results: Tensors) -> None:
        source = frozenset({_Source("inner", unit, self._units[unit])})
        for storage in map(storage_of, results):
            if storage not in self._known:
                self._inner[storage] = source

    def values_read(self, what: str, tensors: Tensors) -> None:
        if self._inside:
            self.used(self._inside, tensors, [])
            return
        sources = self._sources(tensors)
        for source in sorted(sources):
            if source.kind == "output":
                raise UsageError(
                    f"the forward reads values of the output of '{source.name.rpartition('#')[0]}' ({what}), which "
                    "not every stage has; move that decision into a module with a stage, or decide by the batch"
                )
        self._decisive |= {source for source in sources if source.kind == "random"}
        for stage in self._stages[self._reached :]:
            self._needs[stage] |= sources

    # ---- units ----

    def unit_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is not self._modules[name]:  # a copy of the unit
            return call_unintercepted(module, args, kwargs)
        self._enter_stage(name, self._units[name])
        self._inside = name
        try:
            output = fake_forward(module, args, kwargs, lambda: IntraUnitMode(self, name), self._stands_in)
        finally:
            self._inside = None
        self.used(name, tensors_of(output), [])  # a unit may return one of its inputs
        return self._as_outputs(name, output)

    def _enter_stage(self, name: str, stage: int) -> None:
        if stage < self._reached:
            raise UsageError(
                f"'{name}' of stage {stage} is called after a module of stage {self._reached}; stages run one after "
                f"another, so give '{name}' stage {self._reached}, or the modules called before it stage {stage}"
            )
        self._reached = stage

    def _stands_in(self, original: Tensor, stand_in: Tensor) -> None:
        self._add(stand_in, self._sources([original]))

    def _as_outputs(self, name: str, output: Any) -> Any:
        parts = take_apart(output)
        prefix = f"{name}#{self._calls[name]}"
        self._calls[name] += 1
        for leaf in parts.leaves:
            if hides_tensors(leaf):
                raise UsageError(
                    f"'{name}' returns a {type(leaf).__name__}, in which tensors cannot be found; return tensors, "
                    "tuples, lists, dicts or dataclasses"
                )
        return parts.together(
            self._as_output(f"{prefix}/{at}", self._units[name], leaf) if isinstance(leaf, Tensor) else leaf
            for at, leaf in enumerate(parts.leaves)
        )

    def _as_output(self, key: str, stage: int, leaf: Tensor) -> Tensor:
        self._outputs[key] = stage
        made = placeholder(leaf)
        self._born[storage_of(made)] = key
        self._add(made, {_Source("output", key, stage)})
        return as_module_output(made)

    def _sources(self, tensors: Iterable[Tensor]) -> _Sources:
        storages = map(storage_of, tensors)
        return _NOTHING.union(*(self._known.get(one) or self._inner.get(one, _NOTHING) for one in storages))

    def _add(self, tensor: Tensor, sources: Iterable[_Source]) -> None:
        storage = storage_of(tensor)
        self._known[storage] = self._known.get(storage, _NOTHING).union(sources)

    # ---- result ----

    def finish(self, result: Any) -> StageTrace:
        *output, loss = result if isinstance(result, tuple) else (result,)
        # An output may hold what was captured inside units, such as hidden states, as long as the loss does not use it.
        given = self._sources(tensors_of(output))
        self._needs[-1] |= self._sources(tensors_of(loss)) | {source for source in given if source.kind != "inner"}
        self._place_fed_buffers()
        self._refuse_what_cannot_be_shared()  # first: a layer may be skipped at random (layerdrop) and so never called
        for name, stage in self._units.items():
            if not self._calls[name]:
                raise UsageError(
                    f"'{name}' has stage {stage}, but the forward never calls it; give the stage to a module that is "
                    "called"
                )
        return StageTrace(
            units=self._units,
            transfers=tuple(self._transfers()),
            holders=self._holders(),
            inputs=tuple(self._inputs(stage) for stage in self._stages),
            kept=tuple(self._kept(stage) for stage in self._stages),
            written=tuple(
                at
                for at, (leaf, version) in enumerate(zip(self._batch, self._versions, strict=True))
                if isinstance(leaf, Tensor) and leaf._version != version
            ),
        )

    def _place_fed_buffers(self) -> None:
        """Place each buffer that code between units changes (such as an average of a weight) together with its sources.

        Raises ``UsageError`` if a stage that holds the buffer has ended before the change.
        """
        for name, value in self._buffers.items():
            now = self._model.get_buffer(name)
            sources = self._sources([value] if now is value else [now]) | {_Source("weight", name)}
            if now is not value:  # the buffer was replaced by a tensor computed from outputs of these stages
                self._fed[name] = max((source.stage for source in sources if source.kind == "output"), default=0)
            if name in self._fed:
                for stage in self._stages_with(name, sources):
                    self._needs[stage] |= sources

    def _stages_with(self, name: str, sources: _Sources) -> list[int]:
        holders, begun = self._found(), self._fed[name]
        if late := [stage for stage in holders[name] if stage < begun]:
            raise UsageError(
                f"buffer '{name}' is changed after a module of stage {begun} was called, but stage {late[0]} has it, "
                f"which has ended by then; change it before that, or in a module of stage {late[0]}"
            )
        if holders[name]:
            return sorted(holders[name])
        running = self._stages[begun:]  # the stages that run the code that changes the buffer
        fed_by = [holders[source.name] for source in sources if source.kind == "weight" and source.name != name]
        if fed_by:
            return [next((stage for stage in running if all(stage in held for held in fed_by)), running[-1])]
        near = _beside(name, {name: stages for name, stages in holders.items() if stages}, is_buffer=True)
        return [stage for stage in running if stage in near] or [running[-1]]

    def _needed(self, stage: int, kind: str) -> set[str]:
        return {source.name for source in self._needs[stage] if source.kind == kind}

    def _inputs(self, stage: int) -> tuple[bool, ...]:
        needed = self._needed(stage, "batch")
        return tuple(not isinstance(leaf, Tensor) or str(at) in needed for at, leaf in enumerate(self._batch))

    def _kept(self, stage: int) -> tuple[str, ...]:
        needed = self._needed(stage, "output")
        return tuple(key for key, source in self._outputs.items() if source == stage and key in needed)

    def _transfers(self) -> Iterator[TracedTransfer]:
        for target in self._stages:
            needed = self._needed(target, "output")
            for key, source in self._outputs.items():
                if key in needed and source != target:
                    yield TracedTransfer(
                        key=key,
                        source=source,
                        target=target,
                        changed_at_source=source in self._writers[key],
                        changed_at_target=target in self._writers[key],
                    )

    def _refuse_what_cannot_be_shared(self) -> None:
        users: defaultdict[_Source, list[int]] = defaultdict(list)
        for stage in self._stages:
            for source in self._needs[stage]:
                users[source].append(stage)
        for source, stages in sorted(users.items()):
            others = [stage for stage in stages if stage != source.stage]
            if source.kind == "change" and others:
                raise UsageError(
                    f"'{source.name}' of stage {source.stage} changes a tensor in place that stage {others[0]} uses "
                    "too; use inplace=False there, or give both one stage"
                )
            if source.kind == "inner" and others:
                raise UsageError(
                    f"stage {others[0]} uses a tensor that was made inside '{source.name}' of stage {source.stage} and "
                    "is not a result of that module (a hook or a list keeps it), so the stages cannot exchange it; "
                    "return it from the module, leave it out of the loss (transformers: "
                    "config.output_router_logits=False), or train without stages"
                )
            if source in self._decisive and len(stages) > 1:
                raise UsageError(
                    f"the forward decides by random numbers ({source.name.partition('@')[0]} outside of any stage), "
                    f"as layerdrop does, and stages {stages[0]} and {stages[1]} would each draw their own; set the "
                    "probability to 0 (transformers: config.layerdrop, config.encoder_layerdrop, "
                    "config.decoder_layerdrop), or draw inside a module with a stage"
                )
            if source.kind == "random" and len(stages) > 1:
                raise UsageError(
                    f"stages {stages[0]} and {stages[1]} use the same random numbers ({source.name.partition('@')[0]} "
                    "outside of any stage), but would each draw their own; give the module that draws them a stage"
                )

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold each tensor of the model; an unused tensor is held with its neighbors."""
        result = self._found()
        buffers = {name for name, _ in self._model.named_buffers()}
        used = {name: stages for name, stages in result.items() if stages}
        return {name: tuple(sorted(result[name] or _beside(name, used, name in buffers))) for name in result}

    def _found(self) -> dict[str, set[int]]:
        """Return the stages that need each tensor: the stage of its unit, and stages that read it between units."""
        first_names = {id(value): name for name, value in _named_tensors(self._model)}
        result: dict[str, set[int]] = {name: set() for name in first_names.values()}
        for unit, stage in self._units.items():
            for _, value in _named_tensors(self._modules[unit]):
                result[first_names[id(value)]].add(stage)
        for stage in self._stages:
            for name in self._needed(stage, "weight"):
                result[name].add(stage)
        return result


def _beside(name: str, used: Mapping[str, set[int]], is_buffer: bool) -> set[int]:
    """Return the stages for a tensor that no stage reads, from those of its nearest neighbors in the module tree.

    A buffer goes to all stages of its module, because it may be written there, as batch norm's counter is; any other
    tensor goes to one stage.
    """
    owner = place = name.rpartition(".")[0]
    while True:
        near = [stages for other, stages in used.items() if not place or other.startswith(f"{place}.")]
        if near and is_buffer and place == owner:
            return set().union(*near)
        if near or not place:
            return {min((min(stages) for stages in near), default=0)}
        place = place.rpartition(".")[0]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
