"""``Writer``: saves the checkpoints of one job into one directory, in the background or synchronously."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import CheckpointError, UsageError, first_line
from echelon.checkpoint.rank_agreement import SavePeers
from echelon.checkpoint.save import CheckpointSave
from echelon.checkpoint.staging import StagingBuffers
from echelon.checkpoint.write_plan_cache import WritePlanCache
from echelon.distributed.activity import waiting
from echelon.distributed.tensor_layout import Part
from echelon.distributed.world import DEFAULT_TIMEOUT


class Writer:
    """Writes checkpoints into ``directory``. Every rank makes one, and all ranks call ``save`` together.

    ``asynchronous`` copies the tensors to host memory and writes them from a thread while training goes on.
    ``keep`` is the number of checkpoints, up to the one just written, that are kept; older ones are removed. With
    ``only`` the one just written is the only one, and later ones are removed as well.
    ``timeout`` bounds, in seconds, the wait for a rank that is alive but does not join the save.
    ``saved`` is called with the path of each completed checkpoint, maybe from a thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        only: bool = False,
        asynchronous: bool = True,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        saved: Callable[[Path], None] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep} would remove every checkpoint; give at least 1, or None to keep all")
        if group is None and world_size > 1:
            raise UsageError(f"{world_size} processes cannot save together without a group; pass group=")
        self._directory = Path(directory).absolute()
        self._keep = 0 if only else keep
        self._asynchronous = asynchronous
        self._peers = SavePeers(rank, world_size, group, timeout)
        self._allotment = WritePlanCache()
        self._staging = StagingBuffers()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._saved = saved

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | Part],
        facts: dict[str, Any],
        wait: bool | None = None,
    ) -> Path:
        """Store the current ``tensors``, and rank 0's ``facts``, as the checkpoint of ``step``.

        Tensors of the same name on several ranks are assumed equal and written once; of a DTensor or a Part each rank
        writes its local part. Returns the path of the checkpoint: it exists on return if ``wait`` (default: the writer
        is not asynchronous), else after ``wait()``. Calling ``save`` again waits for the previous save.
        """
        self.wait()
        save = CheckpointSave(self._peers, self._allotment, self._directory, step, self._keep)
        save.share(tensors, facts)
        if wait if wait is not None else not self._asynchronous:
            save.write()
            self._report(save)
        else:
            save.stage(self._staging)
            self._thread = threading.Thread(target=self._write, args=(save,), name=f"checkpoint of step {step}")
            self._thread.start()
        return save.final

    def wait(self) -> None:
        """Wait until the last save is complete; raise if it failed."""
        if self._thread is not None:
            with waiting("end of the previous save"):
                self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the last save, and destroy the process group."""
        self.wait()
        self._peers.close()

    def _report(self, save: CheckpointSave) -> None:
        if self._saved is not None:
            self._saved(save.final)

    def _write(self, save: CheckpointSave) -> None:
        try:
            save.write()
            self._report(save)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:
            self._failure = CheckpointError(f"saving {save.final.name}: {first_line(error, typed=True)}")
            self._failure.__cause__ = error
