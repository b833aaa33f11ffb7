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
from echelon.distributed.collectives import gather_json
from echelon.distributed.local_state import PartialSum
from echelon.distributed.tensor_layout import Layout, Part, local_tensor
from echelon.distributed.world import World, seed_for_rank
from echelon.engine.automatic_checkpoints import opened
from echelon.parallel.data.dgc import SparseMomentum
from echelon.parallel.lora.layer import adapted_layers

if TYPE_CHECKING:  # the checkpoint modules take 0.5 s to import, so only a run that saves imports them
    from echelon.checkpoint import Stored, Writer
    from echelon.engine.ema import MovingAverage
    from echelon.engine.in_memory.state_sources import StateSources
    from echelon.engine.parallelize import ParallelModel
    from echelon.engine.run_context import RunContext


class CheckpointManager:
    """Saves and restores all state of a run: weights, optimizers, schedulers, loaders, RNG streams and more.

    stream: index of this rank's RNG stream
    """

    def __init__(self, run: RunContext, world: World, stream: int, parts: ParallelModel, ema: MovingAverage) -> None:
        self._run, self._world, self._stream, self._parts, self._ema = run, world, stream, parts, ema
        self._writers: dict[Path, Writer] = {}
        self._compressors = {key: o for key, o in parts.optimizers.items() if isinstance(o, SparseMomentum)}
        self._buffers = dict(parts.local_state.model.named_buffers())
        self._aliases = model_aliases(parts.local_state.model)
        self._finite = FiniteCheck(parts.local_state, parts.scaler.active)

    def own_state(self) -> dict[str, Tensor]:
        """Return a copy of this rank's own weights and optimizer state under local SGD, else an empty dict.

        The caller must call this method before the weights are replaced by their average.
        """
        if self._parts.local is None:
            return {}
        own = (
            model_tensors(self._parts.local_state) | optimizer_state(self._parts.local_state, self._parts.optimizers)[0]
        )
        return {f"local.{self._world.mesh_rank}.{name}": local_tensor(value).clone() for name, value in own.items()}

    def save(
        self,
        directory: str | Path | None,
        step: int,
        own: Mapping[str, Tensor],
        wait: bool | None,
        best: float | None = None,
    ) -> Path:
        """Write a checkpoint.

        best: result for which it is kept as the only one of its directory; default None
        """
        place = directory if directory is not None else self._run.checkpoints.directory
        if place is None:
            raise UsageError(
                "save() needs a directory: save('ckpt'), or distribute(..., checkpoint=Checkpoint(dir=...))"
            )
        if self._world.rank >= self._world.mesh_size:  # worker 0 saves the weights and the data position of all
            from echelon.checkpoint.directory import final_path

            return final_path(Path(place), step)
        self._run.checkpoints.locks.take(Path(place))
        tensors, facts = self._state(step, own)
        facts["servers"] = self._run.backend.save(Path(place), step)
        facts |= {} if best is None else {"best": best}
        optimizers = self._parts.optimizers.values()
        if wait is None and any(getattr(optimizer, "fills_host", False) for optimizer in optimizers):
            wait = True  # host memory has no room for the second copy that a background write needs
        path = self._writer(Path(place), only=best is not None).save(step, {**tensors, **own}, facts, wait)
        self._run.backend.forget_saves(Path(place))
        return path

    def load(self, source: str | Path | Stored, loaders: bool = True) -> Stored:
        """Restore the whole state and return the checkpoint it came from."""
        stored = opened(source)
        stored.load(model_tensors(self._parts.local_state))
        self._restore_statistics(stored)
        facts = stored.facts
        self._run.positions.restore(stored, loaders)
        self._run.backend.load(stored.path, facts.get("servers"))
        self._restore_strategies(stored)
        self._restore_optimizers(stored)
        self._run.schedules.restore(facts["schedulers"])
        local = self._facts_of_rank(stored)
        self._parts.gradients.restore(local["gradients"], self._merged_gradients(stored))
        self._parts.scaler.restore(local["scaler"])
        self._restore_random(stored)
        self._ema.restore(stored)
        return stored

    def pack_worker_state(self, step: int) -> bytes:
        """Serialize the state that a worker needs to resume after ``step``; parameter servers keep the weights."""
        tensors = random_state(self._stream, self._world.device)
        tensors |= {f"buffer.{name}": value for name, value in self._buffers.items()}
        facts = {
            "step": step,
            "loaders": self._run.positions.states(),
            "schedulers": self._run.schedules.state(),
            "scaler": self._parts.scaler.facts(),
        }
        return to_bytes(tensors, facts)

    def restore_worker_state(self, left: bytes) -> int:
        """Restore the state that ``pack_worker_state`` serialized and return its step."""
        tensors, facts = from_bytes(left)
        random = {name: value for name, value in tensors.items() if name.startswith("rng.")}
        restore_random_state(self._stream, self._world.device, random)
        with torch.no_grad():
            for name, value in self._buffers.items():
                value.copy_(tensors[f"buffer.{name}"])
        self._run.schedules.restore(facts["schedulers"])
        self._parts.scaler.restore(facts["scaler"])
        self._run.positions.place(facts["loaders"])
        return int(facts["step"])

    def wait(self) -> None:
        for writer in self._writers.values():
            writer.wait()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}
        self._run.checkpoints.locks.release()

    @property
    def sources(self) -> StateSources:
        """The locations of the tensors that persist between updates."""
        from echelon.engine.in_memory.state_sources import StateSources

        changing = bool(self._compressors) or self._parts.local is not None
        return StateSources(self._parts.local_state, self._parts.optimizers, changing, lambda: self._ema.averages)

    @property
    def together(self) -> bool:
        """True if all ranks have the same weights now; under local SGD only right after an averaging step."""
        return self._parts.local is None or self._parts.local.since == 0

    def random_tensors(self) -> dict[str, Tensor]:
        return random_state(self._stream, self._world.device)

    def own_statistics(self) -> dict[str, Tensor]:
        """Return the buffers of this replica, such as its batch-norm statistics, under names with its rank."""
        return {
            f"own.{self._world.mesh_rank}.{name.removeprefix('model.')}": local_tensor(value)
            for name, value in model_tensors(self._parts.local_state).items()
            if name.removeprefix("model.") in self._buffers
        }

    def raise_if_not_finite(self, source: Stored) -> None:
        """Raise ``Damaged`` if this rank has read a NaN or an infinity that was not there when training began."""
        if (found := self._finite.find(self.own_tensors()[0])) is not None:
            raise Damaged(f"{source.title} cannot be used: after step {source.step} {self._finite.describe(found)}")

    def _state(self, step: int = 0, own: State | None = None) -> tuple[dict[str, Tensor | Part], dict[str, Any]]:
        """Return the tensors and facts of a checkpoint.

        Raises on all ranks if the state of one rank is not finite: a finite loss may have had an infinite gradient.
        """
        tensors, optimizers = self.own_tensors()
        local, shared = self.own_facts(optimizers)
        local["gradients"] = self._parts.gradients.facts()
        spoiled = self._finite.find({**tensors, **(own or {})})
        report: list[Any] = [local, spoiled and spoiled.to_json()]
        everyone: list[Any] = gather_json(report, self._world.control) if self._world.control else [report]
        self._finite.refuse(step, [bad for _, bad in everyone], self.wait)
        return tensors, merged_facts([each for each, _ in everyone], shared)

    def own_tensors(self) -> tuple[dict[str, Tensor | Part], dict[str, Any]]:
        """Return the tensors of the training state on this rank, and its facts about the optimizers."""
        rank = self._world.mesh_rank
        kept, optimizers = optimizer_state(self._parts.local_state, self._parts.optimizers)
        tensors: dict[str, Tensor | Part] = {
            **model_tensors(self._parts.local_state), **kept, **random_state(self._stream, self._world.device)
        }  # fmt: skip
        for name, grad in self._parts.gradients.unreduced().items():
            layout, addend = self._gradient_layout(name), self._parts.local_state.partial_sums.get(name, PartialSum())
            tensors[f"merge.{addend.index}.{addend.count}.{name}"] = Part(grad, layout) if layout else grad
        for key, compressor in self._compressors.items():
            owed = compressor.residual.tensors() if compressor.leads else {}
            tensors |= {f"dgc.{rank}.{key}.{name}": value for name, value in owed.items()}
        if self._parts.local is not None:
            tensors |= {f"sync.{name}": value for name, value in self._parts.local.tensors().items()}
        if self._ema.averages is not None:
            tensors |= {f"ema.{name}": value for name, value in self._ema.averages.tensors().items()}
        return tensors, optimizers

    def own_facts(self, optimizers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts of this rank, and the facts that are equal on all ranks (see ``merged_facts``).

        On a GPU, numbers among the facts about gradients are still tensors.
        """
        local: dict[str, Any] = {
            "gradients": self._parts.gradients.numbers(),
            "scaler": self._parts.scaler.facts(),
            "local": self._parts.local.facts() if self._parts.local else None,
            "values": {key: of["values"] for key, of in optimizers.items()},
        }
        shared = {
            **self._run.positions.facts(),
            "aliases": self._aliases,
            "adapters": [list(layer) for layer in adapted_layers(self._parts.local_state.model)],
            "ema": self._ema.averages.facts() if self._ema.averages is not None else None,
            "optimizers": {key: {"groups": of["groups"]} for key, of in optimizers.items()},
            "schedulers": self._run.schedules.state(),
        }
        return local, shared

    def _facts_of_rank(self, stored: Stored) -> dict[str, Any]:
        """Return the stored facts of this rank, or those of rank 0 if the number of ranks has changed."""
        same = stored.world_size == self._world.mesh_size
        local: dict[str, Any] = stored.facts["ranks"][self._world.mesh_rank if same else 0]
        return local

    def _own_prefix(self, stored: Stored) -> str:
        """Return the name prefix of this rank's own weights and optimizer state; "" if it must use the shared state.

        Only local SGD stores state per rank, and only the same number of ranks can restore it.
        """
        prefix = f"local.{self._world.mesh_rank}."
        alone = self._parts.local is not None and stored.world_size == self._world.mesh_size
        return prefix if alone and any(name.startswith(prefix) for name in stored.names()) else ""

    def _restore_strategies(self, stored: Stored) -> None:
        for key, compressor in self._compressors.items():
            compressor.residual.clear()
            for rank in self._inherited(stored):
                owed = _read(stored, f"dgc.{rank}.{key}.", drop=f"dgc.{rank}.{key}.")
                for name in compressor.names if owed else ():
                    compressor.residual.add(name, owed[f"u.{name}"], owed[f"v.{name}"])
        if self._parts.local is None:
            return
        prefix = self._own_prefix(stored)
        facts = self._facts_of_rank(stored)["local"] if prefix else None
        self._parts.local.restore(_read(stored, "sync.", drop="sync."), facts)
        own = _read(stored, f"{prefix}model.", drop=prefix) if prefix else {}
        with torch.no_grad():
            for name, value in model_tensors(self._parts.local_state).items() if own else ():
                local_tensor(value).copy_(own[name])

    @torch.no_grad()
    def _restore_statistics(self, stored: Stored) -> None:
        """Restore the buffers of each replica; if the number of ranks has changed, restore their mean."""
        own = sorted(name.split(".", 2)[1] for name in stored.names() if name.startswith("own."))
        if stored.world_size == self._world.mesh_size:
            own = [str(self._world.mesh_rank)]
        for name, value in self._buffers.items():
            found = [stored.read(full) for rank in dict.fromkeys(own) if (full := f"own.{rank}.{name}") in stored]
            if found:
                mean = torch.stack(found).mean(0) if value.is_floating_point() else found[0]
                value.copy_(mean)

    def _inherited(self, stored: Stored) -> list[int]:
        """Return the ranks whose DGC residuals this rank loads.

        If the number of ranks has changed, rank 0 loads those of all ranks.
        """
        if stored.world_size == self._world.mesh_size:
            return [self._world.mesh_rank]
        return list(range(stored.world_size)) if self._world.mesh_rank == 0 else []

    def _restore_optimizers(self, stored: Stored) -> None:
        prefix = self._own_prefix(stored)
        names = [name.removeprefix(prefix) for name in stored.names() if name.startswith(f"{prefix}optimizer.")]

        def read(name: str, layout: Layout | None) -> Tensor:
            whole = layout is None or tuple(stored.shape(prefix + name)) != layout.shape
            return stored.read(prefix + name) if whole or layout is None else stored.read_part(name, layout)

        restore_optimizers(self._parts.optimizers, self._parts.local_state, stored.facts["optimizers"], names, read)

    def _merged_gradients(self, stored: Stored) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the accumulated gradients that this rank loads, each as a name and a function that reads it.

        Accumulated gradients are partial sums. If their count has changed, the rank with addend 0 loads all of them.
        """
        for full in [name for name in stored.names() if name.startswith("merge.")]:
            _, index, count, name = full.split(".", 3)
            local = self._parts.local_state.partial_sums.get(name)
            if local is not None and (int(index) if int(count) == local.count else 0) == local.index:
                yield name, functools.partial(self._read_part, stored, full, name)

    def _read_part(self, stored: Stored, full: str, name: str) -> Tensor:
        layout = self._gradient_layout(name)
        return stored.read(full) if layout is None else stored.read_part(full, layout)

    def _gradient_layout(self, name: str) -> Layout | None:
        """Return the layout of an accumulated gradient: that of the shard if every pass is reduced, else that of the
        parameter."""
        local_state = self._parts.local_state
        return (local_state.layouts if self._parts.gradients.holds_sums else local_state.cuts).get(name)

    def _restore_random(self, stored: Stored) -> None:
        """Restore the RNG state by stream, not by rank: ranks that share a batch must draw the same numbers."""
        local = _read(stored, f"rng.{self._stream}.", drop="")
        if local and stored.world_size == self._world.mesh_size:
            restore_random_state(self._stream, self._world.device, local)
        else:  # another number of ranks has other streams; they are seeded from the seed and the step
            seed_for_rank(self._world.seed + stored.step, self._stream)

    def _writer(self, directory: Path, only: bool = False) -> Writer:
        from echelon.checkpoint import Writer

        if directory not in self._writers:
            settings = self._run.checkpoints.settings or Checkpoint(dir=str(directory))
            self._writers[directory] = Writer(
                directory,
                keep=settings.keep if Path(settings.dir) == directory else None,
                only=only,
                asynchronous=settings.asynchronous,
                rank=self._world.mesh_rank,
                world_size=self._world.mesh_size,
                group=self._world.control,
                timeout=self._world.timeout,
                saved=self._run.voice.saved,
            )
        return self._writers[directory]


def _read(stored: Stored, prefix: str, drop: str) -> dict[str, Tensor]:
    """Read the stored tensors whose names begin with ``prefix``; ``drop`` is removed from their names."""
    return {name.removeprefix(drop): stored.read(name) for name in stored.names() if name.startswith(prefix)}
