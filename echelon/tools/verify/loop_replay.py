"""Recording and replay of a custom loop's inputs: ``LoopRecorder`` on the ranks, ``LoopReplayer`` in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from echelon.base.errors import DataError
from echelon.tools.verify.batches import are_same_batches, concat_batches, on_device, read_batch, write_batch
from echelon.tools.verify.denominators import denominators
from echelon.tools.verify.loop_events import FILLED, FollowedLoader, Kind, put_together, rows_of
from echelon.tools.verify.padded_batches import padded_together
from echelon.tools.verify.samples import GatheredBatch, SampleReader, SampleWriter, is_passed_on
from echelon.tools.verify.unsharded_data import whole_data
from echelon.tools.verify.verify_request import VerifyRequest

_OVER = object()
#: Explanation why the replicas' batches cannot be merged, and advice for the user.
APART = (
    "the replicas' batches do not fit into one (rows of other lengths?), so that one process cannot be given the "
    "global batch; take engine.loader(dataset, collate=...), whose samples are collated anew, or batches of one length"
)


def _file(question: VerifyRequest, number: int, replica: int) -> Path:
    return question.file(f"event-{number}-{replica}.safetensors")


class LoopRecorder:
    """Records the inputs of a custom loop on a rank.

    Inputs stay in memory until ``write``, because only then is it known that the script has a custom loop.

    kinds:      kinds of all events so far
    rows:       number of rows of the last batch
    counts:     possible denominators of the last batch's loss
    stray:      functions whose random draws cannot be followed
    read_whole: checksum of the data set of the first ``torch.utils.data.DataLoader``; None if it reads only a part
    """

    def __init__(self, question: VerifyRequest) -> None:
        self._question = question
        self.kinds: list[Kind] = []
        self.rows: int | None = None
        self.counts: dict[str, float] = {}
        self.read_whole: list[int | None] = []
        self.stray: set[str] = set()
        self._held: list[tuple[int, Any]] = []
        self._off, self.quiet = False, False

    def batches(self, own: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        loader = source if isinstance(source, FollowedLoader) else None
        writer = loader.samples if loader is not None and isinstance(loader.samples, SampleWriter) else None
        if writer is not None:
            writer.begin()
        if isinstance(source, DataLoader) and not self.read_whole:
            self.read_whole.append(whole_data(source))
        with self._quietly(writer):
            batches = own()
        while True:
            with self._quietly(writer):
                batch = next(batches, _OVER)
            if batch is _OVER:
                break
            if writer is not None and loader is not None:
                writer.handed_out(counts=loader.share > 0)
            if not self._off:
                self.rows, self.counts = rows_of(batch), denominators(batch)
            self._note("batch", batch)
            yield batch
        self._note("end", None)

    @contextlib.contextmanager
    def _quietly(self, writer: SampleWriter | None) -> Iterator[None]:
        before, self.quiet = self.quiet, True
        try:
            with writer.listening() if writer is not None else contextlib.nullcontext():
                yield
        finally:
            self.quiet = before

    def drawn(self, own: Tensor, name: str) -> Tensor:
        self._note("draw", own.detach().clone())
        return own

    def strayed(self, name: str) -> None:
        self.stray.add(name)

    def stop(self) -> None:
        """Stop recording and drop the inputs held in memory: the script does not have a custom loop."""
        self._off, self._held = True, []

    def write(self, replica: int | None) -> None:
        """Write the inputs since the last call to files.

        replica: index of this rank's replica; None if another rank has the same inputs and writes them
        """
        for number, value in self._held:
            if replica is not None and value is not None:
                try:
                    write_batch(_file(self._question, number, replica), value)
                except DataError as error:
                    self._question.refuse(str(error))
        self._held = []

    def _note(self, kind: Kind, value: Any) -> None:
        if not self._off:
            self._held.append((len(self.kinds), value))
            self.kinds.append(kind)


def whole_batch(batches: list[Any], own: Any, gathered: GatheredBatch | None) -> Any:
    """Return the batches of all replicas as one; None if they do not fit and their samples are not known.

    own:      the batch that the script in one process made of ``gathered``, or of its own data
    gathered: the samples of all replicas, collated again
    """
    whole = concat_batches(batches)
    if whole is not None or gathered is None:
        return whole
    whole = padded_together(own, batches)
    return own if whole is None and is_passed_on(own, gathered, batches) else whole


class GlobalBatchFollower:
    """Lets the loaders of one process hand out global batches, for a script that calls ``engine.step()``.

    A loader hands out its own batch if the samples of the replicas are not known.

    last: the batch handed out last
    """

    def __init__(self) -> None:
        self.last: GatheredBatch | None = None
        self.quiet = False

    def batches(self, own: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        reader = source.samples if isinstance(source, FollowedLoader) else None
        for batch in own():
            self.last = reader.next() if isinstance(reader, SampleReader) else None
            yield batch if self.last is None else self.last.batch

    def drawn(self, own: Tensor, name: str) -> Tensor:
        return own

    def strayed(self, name: str) -> None:
        """Do nothing: only batches are followed here."""


class LoopReplayer:
    """Gives the loop in one process the inputs of the ranks' loops, in the same order.

    kinds: kinds of the ranks' events
    order: maps the number of an own event to the number of the ranks' event; default: the same number
    """

    def __init__(
        self,
        question: VerifyRequest,
        kinds: Sequence[Kind],
        replicas: int,
        device: torch.device,
        order: Callable[[int], int] | None = None,
    ) -> None:
        self._question = question
        self._kinds = kinds
        self._replicas = replicas
        self._device = device
        self._order = order or (lambda number: number)
        self._at, self._event, self.quiet = 0, 0, False
        self._rows: list[int | None] = [None] * replicas
        self.alike, self.batches_taken = True, 0  #: True if all replicas had the same batches; number of batches
        self.stray: set[str] = set()

    def batches(self, own: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        reader = source.samples if isinstance(source, FollowedLoader) else None
        while self._next("batch", "end") == "batch":
            found = self._taken()
            self._rows = [rows_of(batch) for batch in found]
            gathered = reader.next() if isinstance(reader, SampleReader) else None
            self.alike = self.alike and are_same_batches(found)
            self.batches_taken += 1
            whole = whole_batch(found, None if gathered is None else gathered.batch, gathered)
            if whole is None:
                self._question.give_up(APART)
            yield whole

    def drawn(self, own: Tensor, name: str) -> Tensor:
        if self._next("draw") is None:
            return own
        found = self._taken()
        rows = self._rows if len(found) == len(self._rows) else [None] * len(found)
        whole, in_place = put_together(found, own, rows, order=name == "randperm"), name in FILLED
        if whole is None or (in_place and whole.shape != own.shape):
            self.strayed(f"random numbers of shape {tuple(own.shape)}, other ones on each rank")
            return own
        if not in_place:
            return whole.requires_grad_(own.requires_grad)
        with torch.no_grad():
            return own.copy_(whole)

    def strayed(self, name: str) -> None:
        self.stray.add(name)

    def _next(self, *wanted: Kind) -> Kind | None:
        """Advance to the next event of the ranks and return its kind; None after the last event.

        The inputs after the last event are not compared any more. The command refuses a loop whose event is not one of
        the ``wanted`` kinds.
        """
        self._event = self._order(self._at)
        if self._event >= len(self._kinds):
            return None
        kind = self._kinds[self._event]
        if kind not in wanted:
            names = {"batch": "a batch of its loader", "end": "the end of its loader", "draw": "random numbers"}
            self._question.refuse(
                f"the loop differs in one process: it requests {names[wanted[0]]} where the ranks had {names[kind]}; "
                "make it independent of the number of ranks"
            )
        self._at += 1
        return kind

    def _taken(self) -> list[Any]:
        """Read the inputs of all replicas at the current event."""
        paths = [_file(self._question, self._event, replica) for replica in range(self._replicas)]
        return [on_device(read_batch(path), self._device) for path in paths if path.exists()]
