"""``CheckpointCalls``: the engine's calls that save the model and its training state, and load them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from echelon.engine.collective_calls import collective_call
from echelon.engine.engine_state import EngineState
from echelon.engine.whole_model import whole_state


class CheckpointCalls(EngineState):
    """Calls that write or read files of the whole model; all ranks make them together."""

    @collective_call("save")
    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Write a checkpoint of the whole training state and return its path; all ranks call it together.

        directory: directory of the checkpoint; default: that of ``distribute(checkpoint=...)``
        wait:      True returns when the checkpoint is on disk; default: writes in the background if the settings say so

        >>> path = engine.save("runs/checkpoints", wait=True)
        """
        return self._save(directory, wait)

    @collective_call("save")
    def save_best(
        self, value: float, directory: str | Path | None = None, *, largest: bool = False, wait: bool | None = None
    ) -> Path | None:
        """Write a checkpoint if ``value`` is the best so far, in place of the best one before; return its path or None.

        All ranks call it together. A resumed run goes on comparing with the value that was saved last.

        value:     result of an evaluation, the same on all ranks; NaN is never best
        directory: directory of this one checkpoint; default: ``best`` in that of ``distribute(checkpoint=...)``
        largest:   True if a larger value is better; default: a smaller one, as for a loss
        wait:      as in ``save``

        >>> path = engine.save_best(engine.evaluate(dataset)["loss"], "runs/best")
        """
        place = self._best.place(directory)
        return self._save(place, wait, float(value)) if self._best.accepts(value, largest, place) else None

    def _save(self, directory: str | Path | None, wait: bool | None, best: float | None = None) -> Path:
        with self._clock.apart("checkpoint"):
            self._passes.losses.check_all()
            self._ema.before_save()
            own = self._checkpoints.own_state()  # this rank's own weights, before the average is shown
            with self._replicas.shown():
                return self._checkpoints.save(directory, self.steps, own, wait, best)

    @collective_call("communicate")
    def whole_state(self) -> dict[str, Tensor]:
        """Return the full state dict of the model, in host memory, on every rank. All ranks call it.

        Under ``split``, a pipeline or ``shard`` the ``model`` of a rank holds only parts of it.
        """
        is_sharded = self.plan.is_model_parallel or self.plan.shard is not None
        with self._run.checker.explained(), self._replicas.shown():
            return whole_state(self._parts.local_state, self._run.world.control, is_sharded)

    @collective_call("save")
    def save_adapter(self, directory: str | Path) -> Path:
        """Write the adapters in PEFT's format, whole from any layout, and return the directory; all ranks call it.

        ``peft.PeftModel.from_pretrained(model, directory)`` and ``Lora(weights=directory)`` read it.

        directory: directory of ``adapter_config.json`` and ``adapter_model.safetensors``

        >>> engine = echelon.distribute(model, optimizer, loss=loss, strategy=echelon.Strategy(lora=8))
        >>> engine.save_adapter("runs/adapter")
        """
        from echelon.engine.adapter_saving import save_adapter

        with self._clock.apart("checkpoint"), self._run.checker.explained(), self._replicas.shown():
            return save_adapter(self.model, self.plan, self._parts.local_state, self._run.world, Path(directory))

    @collective_call("save")
    def save_pretrained(
        self,
        directory: str | Path,
        *,
        max_shard_size: str | float = "5 GB",
        dtype: torch.dtype | str | None = None,
    ) -> Path:
        """Write the model as a directory that ``AutoModel.from_pretrained`` loads; all ranks call it together.

        Safetensors files with an index, config, generation config, and the tokenizer's files from the directory that
        the model came from. Ranks take turns in writing the files; none holds more than a tensor beyond its part. A
        former directory of that name stays whole until the new one is complete; its other files are taken over.

        directory:      directory to write
        max_shard_size: largest size of a file, as bytes or as ``"5 GB"``
        dtype:          dtype to write floating-point weights in, or its name; default: their own

        >>> path = engine.save_pretrained("runs/tuned", dtype=torch.bfloat16)
        """
        from echelon.engine.pretrained_files import save_model_directory

        is_sharded = self.plan.is_model_parallel or self.plan.shard is not None
        with self._clock.apart("checkpoint"), self._run.checker.explained(), self._replicas.shown():
            return save_model_directory(
                directory, self._parts.local_state, self._run.world, is_sharded, max_shard_size, dtype
            )

    @collective_call("load")
    def load(self, path: str | Path) -> None:
        """Load a checkpoint, or the newest one in a directory; any number of processes may have saved it.

        path: a checkpoint, or a directory of checkpoints

        >>> engine.load("runs/checkpoints")
        """
        self._ema.refuse("engine.load()")
        self._run.progress.resume_at(self._restorer.load(path))
        self._nonfinite.keep()

    def resume(self) -> None:
        """Resume from in-memory snapshots or from the newest checkpoint of ``distribute(checkpoint=...)``, if any."""
        self._run.progress.resume_at(self._restorer.newest(self.steps))
        self._nonfinite.keep()
