"""Saves the whole training state of a run into checkpoints and restores it from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.base.errors import Damaged, UsageError
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.checkpoint.directory_lock import DirectoryLocks
from echelon.checkpoint.finite_state import FiniteCheck, State
from echelon.checkpoint.training_state import (
    from_bytes,
    merged_facts,
    model_aliases,
    model_tensors,
    optimizer_state,
    random_state,
    restore_optimizers,
    restore_random_state,
    to_bytes,
)
from echelon.data import Loader
from echelon.distributed.collectives import gather_json
from echelon.distributed.local_state import Addend
from echelon.distributed.tensor_layout import Layout, Part, local_tensor
from echelon.distributed.world import World, seed_for_rank
from echelon.engine.elastic import ElasticState
from echelon.engine.lr_schedules import LRSchedulers
from echelon.engine.overridden_values import UserHyperparameters
from echelon.parallel.data.dgc import SparseMomentum

if TYPE_CHECKING:  # the checkpoint modules take 0.5 s to import, so only a run that saves imports them
    from echelon.checkpoint import Stored, Writer
    from echelon.engine.in_memory.state_sources import StateSources
    from echelon.engine.parallelize import ParallelModel
    from echelon.parallel.ema_weights import EmaWeights
    from echelon.parameter_server.worker.session import ParameterServerSession


class CheckpointManager:
    """Saves and restores all state of a run: weights, optimizers, schedulers, loaders, RNG streams and more."""

    def __init__(self, world: World, stream: int, schedules: LRSchedulers, settings: Checkpoint | None) -> None:
        self._world, self.stream = world, stream
        self._schedules, self._settings = schedules, settings
        self.beginning = ElasticState(None, world.size)  #: ranks and batch sizes that training began with
        self._writers: dict[Path, Writer] = {}
        self._loaders: list[Loader] = []
        self._loader_states: list[dict[str, Any]] = []
        self.average: EmaWeights | None = None  #: moving average of the weights; None without one
        self.copies_averages = False  #: True if in-memory snapshots are taken
        self._loaded: Stored | None = None  # a checkpoint whose averaged weights have not been restored yet
        self.given = UserHyperparameters()
        self.claims = DirectoryLocks(world.control, writes=world.rank == 0)
        self.saved: Callable[[Path], None] | None = None  #: called when a checkpoint is complete, maybe from a thread

    def takes(self, parts: ParallelModel) -> None:
        """Set the parallel model whose state is saved and restored from now on."""
        self._holdings, self._optimizers, self._gradients = parts.holdings, parts.optimizers, parts.gradients
        self._scaler, self._local = parts.scaler, parts.local
        self._compressors = {key: o for key, o in parts.optimizers.items() if isinstance(o, SparseMomentum)}
        self._buffers = dict(parts.holdings.model.named_buffers())
        self._aliases = model_aliases(parts.holdings.model)
        self._finite = FiniteCheck(parts.holdings, parts.scaler.active)
        self.given.take(parts.optimizers, self._schedules.all)

    @property
    def kept_in(self) -> str | None:
        """The directory of automatic checkpoints; None without one."""
        return self._settings.dir if self._settings is not None else None

    def due(self, step: int) -> bool:
        """Return True if an automatic checkpoint is due at this step. The first call locks the directory."""
        if self._settings is None or not self._settings.every:
            return False
        if not self.claims:
            self.claims.take(Path(self._settings.dir))
        return step % self._settings.every == 0

    def register(self, loader: Loader) -> None:
        """Save the position of this loader, too. Loaders are identified by the order in which they were created."""
        index = len(self._loaders)
        self._loaders.append(loader)
        if index < len(self._loader_states):
            loader.load_state_dict(self._loader_states[index])
        self.given.compare_batch(index, loader, self.claims.say)

    def own_state(self) -> dict[str, Tensor]:
        """Return a copy of this rank's own weights and optimizer state under local SGD, else an empty dict.

        The caller must call this method before the weights are replaced by their average.
        """
        if self._local is None:
            return {}
        own = model_tensors(self._holdings) | optimizer_state(self._holdings, self._optimizers)[0]
        return {f"local.{self._world.rank}.{name}": local_tensor(value).clone() for name, value in own.items()}

    def save(
        self,
        directory: str | Path | None,
        step: int,
        own: Mapping[str, Tensor],
        wait: bool | None,
        served: ParameterServerSession | None = None,
    ) -> Path:
        place = directory if directory is not None else (self._settings.dir if self._settings else None)
        if place is None:
            raise UsageError(
                "save() needs a directory: save('ckpt'), or distribute(..., checkpoint=Checkpoint(dir=...))"
            )
        if served is not None:
            from echelon.checkpoint.directory import final_path

            if served.dense and served.worker != 0:  # all workers have the same weights and the same data position
                return final_path(Path(place), step)
        self.claims.take(Path(place))
        tensors, facts = self._state(step, own)
        if served is not None:
            served.save(Path(place), step, alone=served.dense or self._world.rank == 0)
        facts["servers"] = served.saved_as(step) if served is not None else None
        if wait is None and any(getattr(optimizer, "fills_host", False) for optimizer in self._optimizers.values()):
            wait = True  # host memory has no room for the second copy that a background write needs
        path = self._writer(Path(place)).save(step, {**tensors, **own}, facts, wait)
        if served is not None and self._world.rank == 0:
            served.forget_saves(Path(place))
        return path

    def peek(self, source: str | Path | Stored) -> Stored:
        """Restore only loaders and elastic state; the rest is restored after the model is partitioned."""
        stored = _opened(source)
        self.beginning.restore(stored.facts.get("elastic"))
        self.given.resume(stored.facts.get("given"))
        self.place_loaders(stored.facts["loaders"])
        return stored

    def load(
        self, source: str | Path | Stored, loaders: bool = True, served: ParameterServerSession | None = None
    ) -> Stored:
        """Restore the whole state and return the checkpoint it came from."""
        stored = _opened(source)
        stored.load(model_tensors(self._holdings))
        self._restore_statistics(stored)
        facts = stored.facts
        self.beginning.restore(facts.get("elastic"))
        self.given.resume(facts.get("given"))
        if served is not None:
            served.load(stored.path, facts.get("servers"), asks=served.worker == 0 and self._world.rank == 0)
        self._restore_strategies(stored)
        self._restore_optimizers(stored)
        self._schedules.restore(facts["schedulers"])
        mine = self._facts_of_rank(stored)
        self._gradients.restore(mine["gradients"], self._merged_gradients(stored))
        self._scaler.restore(mine["scaler"])
        if loaders:
            self.place_loaders(facts["loaders"])
        self._restore_random(stored)
        self._restore_average(stored)
        return stored

    @property
    def holds_average(self) -> bool:
        """True if the checkpoint loaded last has averaged weights that were not restored yet."""
        return self._loaded is not None

    def average_from(self, step: int) -> Stored | None:
        """Return the loaded checkpoint if its unrestored averaged weights are those after ``step``, else None."""
        stored, self._loaded = self._loaded, None
        return stored if stored is not None and stored.step == step else None

    def _restore_average(self, stored: Stored) -> None:
        self._loaded = None
        if self.average is not None:
            self.average.restore(stored)
        elif stored.facts.get("ema") is not None:
            self._loaded = stored

    def pack_worker_state(self, step: int) -> bytes:
        """Serialize the state that a worker needs to resume after ``step``; parameter servers keep the weights."""
        tensors = random_state(self.stream, self._world.device)
        tensors |= {f"buffer.{name}": value for name, value in self._buffers.items()}
        facts = {
            "step": step,
            "loaders": [loader.state_dict() for loader in self._loaders],
            "schedulers": self._schedules.state(),
            "scaler": self._scaler.facts(),
        }
        return to_bytes(tensors, facts)

    def restore_worker_state(self, left: bytes) -> int:
        """Restore the state that ``pack_worker_state`` serialized and return its step."""
        tensors, facts = from_bytes(left)
        random = {name: value for name, value in tensors.items() if name.startswith("rng.")}
        restore_random_state(self.stream, self._world.device, random)
        with torch.no_grad():
            for name, value in self._buffers.items():
                value.copy_(tensors[f"buffer.{name}"])
        self._schedules.restore(facts["schedulers"])
        self._scaler.restore(facts["scaler"])
        self.place_loaders(facts["loaders"])
        return int(facts["step"])

    def place_loaders(self, states: list[dict[str, Any]]) -> None:
        """Restore the positions of the loaders, including loaders that are created later."""
        self._loader_states = states
        for loader, state in zip(self._loaders, states, strict=False):
            loader.load_state_dict(state)

    def kept(self) -> list[Path]:
        """Return the checkpoints that the same command can resume from, newest first."""
        if self._settings is None or not self._settings.resume:
            return []
        from echelon.checkpoint.directory import complete

        return [path for _, path in sorted(complete(Path(self._settings.dir)).items(), reverse=True)]

    def verify(self, checkpoint: Path) -> None:
        """Read the whole checkpoint. Raises ``Damaged``."""
        _opened(checkpoint).verify()

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none or the newest is damaged."""
        try:
            return next((_opened(path).step for path in self.kept()), 0)
        except Damaged:
            return 0

    def wait(self) -> None:
        for writer in self._writers.values():
            writer.wait()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}
        self.claims.release()

    @property
    def sources(self) -> StateSources:
        """The locations of the tensors that persist between updates."""
        from echelon.engine.in_memory.state_sources import StateSources

        self.copies_averages = True
        changing = bool(self._compressors) or self._local is not None
        return StateSources(self._holdings, self._optimizers, changing, lambda: self.average)

    @property
    def together(self) -> bool:
        """True if all ranks have the same weights now; under local SGD only right after an averaging step."""
        return self._local is None or self._local.since == 0

    def random_tensors(self) -> dict[str, Tensor]:
        return random_state(self.stream, self._world.device)

    def own_statistics(self) -> dict[str, Tensor]:
        """Return the buffers of this replica, such as its batch-norm statistics, under names with its rank."""
        return {
            f"own.{self._world.rank}.{name.removeprefix('model.')}": local_tensor(value)
            for name, value in model_tensors(self._holdings).items()
            if name.removeprefix("model.") in self._buffers
        }

    def raise_if_not_finite(self, source: Stored) -> None:
        """Raise ``Damaged`` if this rank has read a NaN or an infinity that was not there when training began."""
        if (found := self._finite.find(self.own_tensors()[0])) is not None:
            raise Damaged(f"{source.title} is of no use: after step {source.step} {self._finite.describe(found)}")

    def _state(self, step: int = 0, own: State | None = None) -> tuple[dict[str, Tensor | Part], dict[str, Any]]:
        """Return the tensors and facts of a checkpoint.

        Raises on all ranks if the state of one rank is not finite: a finite loss may have had an infinite gradient.
        """
        tensors, optimizers = self.own_tensors()
        mine, shared = self.own_facts(optimizers)
        mine["gradients"] = self._gradients.facts()
        spoiled = self._finite.find({**tensors, **(own or {})})
        told: list[Any] = [mine, spoiled and spoiled.to_json()]
        everyone: list[Any] = gather_json(told, self._world.control) if self._world.control else [told]
        self._finite.refuse(step, [bad for _, bad in everyone], self.wait)
        return tensors, merged_facts([each for each, _ in everyone], shared)

    def own_tensors(self) -> tuple[dict[str, Tensor | Part], dict[str, Any]]:
        """Return the tensors of the training state on this rank, and its facts about the optimizers."""
        rank = self._world.rank
        kept, optimizers = optimizer_state(self._holdings, self._optimizers)
        tensors: dict[str, Tensor | Part] = {
            **model_tensors(self._holdings), **kept, **random_state(self.stream, self._world.device)
        }  # fmt: skip
        for name, grad in self._gradients.unreduced().items():
            layout, addend = self._gradient_layout(name), self._holdings.addends.get(name, Addend())
            tensors[f"merge.{addend.index}.{addend.count}.{name}"] = Part(grad, layout) if layout else grad
        for key, compressor in self._compressors.items():
            owed = compressor.residual.tensors() if compressor.leads else {}
            tensors |= {f"dgc.{rank}.{key}.{name}": value for name, value in owed.items()}
        if self._local is not None:
            tensors |= {f"sync.{name}": value for name, value in self._local.tensors().items()}
        if self.average is not None:
            tensors |= {f"ema.{name}": value for name, value in self.average.tensors().items()}
        return tensors, optimizers

    def own_facts(self, optimizers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts of this rank, and the facts that are equal on all ranks (see ``merged_facts``).

        On a GPU, numbers among the facts about gradients are still tensors.
        """
        mine: dict[str, Any] = {
            "gradients": self._gradients.numbers(),
            "scaler": self._scaler.facts(),
            "local": self._local.facts() if self._local else None,
            "values": {key: of["values"] for key, of in optimizers.items()},
        }
        shared = {
            "elastic": self.beginning.facts(),
            "given": self.given.facts(self._loaders),
            "aliases": self._aliases,
            "ema": self.average.facts() if self.average is not None else None,
            "optimizers": {key: {"groups": of["groups"]} for key, of in optimizers.items()},
            "schedulers": self._schedules.state(),
            "loaders": [loader.state_dict() for loader in self._loaders],
        }
        return mine, shared

    def _facts_of_rank(self, stored: Stored) -> dict[str, Any]:
        """Return the stored facts of this rank, or those of rank 0 if the number of ranks has changed."""
        same = stored.world_size == self._world.size
        mine: dict[str, Any] = stored.facts["ranks"][self._world.rank if same else 0]
        return mine

    def _own_prefix(self, stored: Stored) -> str:
        """Return the name prefix of this rank's own weights and optimizer state; "" if it must use the shared state.

        Only local SGD stores state per rank, and only the same number of ranks can restore it.
        """
        prefix = f"local.{self._world.rank}."
        alone = self._local is not None and stored.world_size == self._world.size
        return prefix if alone and any(name.startswith(prefix) for name in stored.names()) else ""

    def _restore_strategies(self, stored: Stored) -> None:
        for key, compressor in self._compressors.items():
            compressor.residual.clear()
            for rank in self._inherited(stored):
                owed = _read(stored, f"dgc.{rank}.{key}.", drop=f"dgc.{rank}.{key}.")
                for name in compressor.names if owed else ():
                    compressor.residual.add(name, owed[f"u.{name}"], owed[f"v.{name}"])
        if self._local is None:
            return
        prefix = self._own_prefix(stored)
        facts = self._facts_of_rank(stored)["local"] if prefix else None
        self._local.restore(_read(stored, "sync.", drop="sync."), facts)
        own = _read(stored, f"{prefix}model.", drop=prefix) if prefix else {}
        with torch.no_grad():
            for name, value in model_tensors(self._holdings).items() if own else ():
                local_tensor(value).copy_(own[name])

    @torch.no_grad()
    def _restore_statistics(self, stored: Stored) -> None:
        """Restore the buffers of each replica; if the number of ranks has changed, restore their mean."""
        own = sorted(name.split(".", 2)[1] for name in stored.names() if name.startswith("own."))
        if stored.world_size == self._world.size:
            own = [str(self._world.rank)]
        for name, value in self._buffers.items():
            found = [stored.read(full) for rank in dict.fromkeys(own) if (full := f"own.{rank}.{name}") in stored]
            if found:
                mean = torch.stack(found).mean(0) if value.is_floating_point() else found[0]
                value.copy_(mean)

    def _inherited(self, stored: Stored) -> list[int]:
        """Return the ranks whose DGC residuals this rank loads.

        If the number of ranks has changed, rank 0 loads those of all ranks.
        """
        if stored.world_size == self._world.size:
            return [self._world.rank]
        return list(range(stored.world_size)) if self._world.rank == 0 else []

    def _restore_optimizers(self, stored: Stored) -> None:
        prefix = self._own_prefix(stored)
        names = [name.removeprefix(prefix) for name in stored.names() if name.startswith(f"{prefix}optimizer.")]

        def read(name: str, layout: Layout | None) -> Tensor:
            whole = layout is None or tuple(stored.shape(prefix + name)) != layout.shape
            return stored.read(prefix + name) if whole or layout is None else stored.read_part(name, layout)

        restore_optimizers(self._optimizers, self._holdings, stored.facts["optimizers"], names, read)

    def _merged_gradients(self, stored: Stored) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the accumulated gradients that this rank loads, each as a name and a function that reads it.

        Accumulated gradients are partial sums. If their count has changed, the rank with addend 0 loads all of them.
        """
        for full in [name for name in stored.names() if name.startswith("merge.")]:
            _, index, count, name = full.split(".", 3)
            mine = self._holdings.addends.get(name)
            if mine is not None and (int(index) if int(count) == mine.count else 0) == mine.index:
                yield name, functools.partial(self._read_part, stored, full, name)

    def _read_part(self, stored: Stored, full: str, name: str) -> Tensor:
        layout = self._gradient_layout(name)
        return stored.read(full) if layout is None else stored.read_part(full, layout)

    def _gradient_layout(self, name: str) -> Layout | None:
        """Return the layout of an accumulated gradient: that of the shard if every pass is reduced, else that of the
        parameter."""
        return (self._holdings.layouts if self._gradients.holds_sums else self._holdings.cuts).get(name)

    def _restore_random(self, stored: Stored) -> None:
        """Restore the RNG state by stream, not by rank: ranks that share a batch must draw the same numbers."""
        mine = _read(stored, f"rng.{self.stream}.", drop="")
        if mine and stored.world_size == self._world.size:
            restore_random_state(self.stream, self._world.device, mine)
        else:  # another number of ranks has other streams; they are seeded from the seed and the step
            seed_for_rank(self._world.seed + stored.step, self.stream)

    def _writer(self, directory: Path) -> Writer:
        from echelon.checkpoint import Writer

        if directory not in self._writers:
            settings = self._settings or Checkpoint(dir=str(directory))
            self._writers[directory] = Writer(
                directory,
                keep=settings.keep if Path(settings.dir) == directory else None,
                asynchronous=settings.asynchronous,
                rank=self._world.rank,
                world_size=self._world.size,
                group=self._world.control,
                timeout=self._world.timeout,
            )
            self._writers[directory].saved = self.saved
        return self._writers[directory]


def _opened(source: str | Path | Stored) -> Stored:
    from echelon.checkpoint import Stored, find

    return source if isinstance(source, Stored) else Stored(find(source))


def _read(stored: Stored, prefix: str, drop: str) -> dict[str, Tensor]:
    """Read the stored tensors whose names begin with ``prefix``; ``drop`` is removed from their names."""
    return {name.removeprefix(drop): stored.read(name) for name in stored.names() if name.startswith(prefix)}
