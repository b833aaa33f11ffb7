"""Interception of the inputs of a custom training loop: loader batches and random numbers, in their order.

``engine.step(batch)`` shows the inputs of a step. A loop that calls the model itself does not, but the loop is a
function of its inputs. So the inputs of the ranks' loops are recorded, and the loop in one process is given the same
inputs, with the rows of all replicas concatenated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from echelon.data import Loader
from echelon.data.data_source import RankBatch
from echelon.distributed.activity import activity
from echelon.tools.verify.float64 import to_float64
from echelon.tools.verify.samples import SampleReader, SampleWriter

Kind = Literal["batch", "end", "draw"]

_MADE = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "randperm",
         "multinomial", "poisson")  # fmt: skip
FILLED = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
#: Functions that draw random numbers but return their transformed input: there is no random tensor to replay.
_STRAY = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu",
          "gumbel_softmax")  # fmt: skip


class DrawFollower(Protocol):
    """Receives each random tensor and returns the tensor that the caller gets.

    quiet: True while a loader works: its batches are followed, its random draws are not
    """

    quiet: bool

    def drawn(self, own: Tensor, name: str) -> Tensor: ...

    def strayed(self, name: str) -> None: ...


class LoopFollower(DrawFollower, Protocol):
    """Receives every input of the loop (random tensors and batches) and returns what the loop gets."""

    def batches(self, own: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]: ...


_PLAIN = DataLoader.__iter__


class RandomDrawMode(TorchFunctionMode):
    """A mode in which random tensors pass through the follower."""

    def __init__(self, follower: DrawFollower) -> None:
        super().__init__()
        self._draws = follower

    @property
    def is_off(self) -> bool:
        """True if draws are not followed now; draws in a graph that is being compiled cannot be followed."""
        return self._draws.quiet or torch.compiler.is_compiling()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.is_off:
            return result
        if name in _STRAY and _drops(name, tuple(args), kwargs or {}):
            self._draws.strayed(name)
        elif name in _MADE or name in FILLED:
            return self._draws.drawn(result, name)
        return result


class LoopInputMode(RandomDrawMode):
    """A mode in which random tensors created outside of engine calls, and batches of ``torch.utils.data.DataLoader``,
    pass through the follower."""

    def __init__(self, follower: LoopFollower, wide: bool) -> None:
        super().__init__(follower)

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if activity.call or follower.quiet:
                return _PLAIN(loader)
            return widened_each(follower.batches(lambda: _PLAIN(loader), loader), wide)

        self._iterate = iterate

    def open(self) -> None:
        """Enter the mode in this thread. User code runs the loop, so there is no ``with`` statement around it."""
        self.__enter__()  # type: ignore[no-untyped-call]
        DataLoader.__iter__ = self._iterate  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        DataLoader.__iter__ = _PLAIN  # type: ignore[method-assign]
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def is_off(self) -> bool:
        return bool(activity.call) or super().is_off


def _drops(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return True if this call of a ``_STRAY`` function, or of its native counterpart, draws random numbers."""
    if name == "gumbel_softmax":
        return True
    part = named.get("p", args[1] if len(args) > 1 else 0.5)
    training = named.get("training", args[2] if len(args) > 2 else True)
    return bool(training) and (name == "rrelu" or bool(part))


def widened_each(batches: Iterator[Any], wide: bool) -> Iterator[Any]:
    return (to_float64(batch) if wide else batch for batch in batches)


class FollowedLoader(Loader):
    """A loader whose batches pass through the follower; ``follow`` assigns this class to an existing loader.

    share: samples of the current batch that count
    """

    follower: LoopFollower
    wide: bool
    samples: SampleWriter | SampleReader
    share = 0

    def __iter__(self) -> Iterator[Any]:
        return widened_each(self.follower.batches(super().__iter__, self), self.wide)

    def _account(self, piece: RankBatch) -> None:
        super()._account(piece)
        self.share = piece.share


def follow(loader: Loader, follower: LoopFollower, wide: bool, samples: SampleWriter | SampleReader) -> Loader:
    loader.stop_workers()
    loader.__class__ = FollowedLoader
    assert isinstance(loader, FollowedLoader)
    loader.follower, loader.wide, loader.samples = follower, wide, samples
    return loader


def rows_of(batch: Any) -> int | None:
    """Return the length of the first tensor with at least one dimension; None if there is none."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)


def put_together(
    drawn: Sequence[Tensor], own: Tensor, rows: Sequence[int | None], *, order: bool = False
) -> Tensor | None:
    """Return the replicas' draws concatenated; None if they are not draws for the rows of a batch.

    rows:  number of rows of each replica's batch, None if there is no batch
    order: the draws are permutations of rows (``randperm``): indices are offset by the rows of the replicas before
    """
    first = drawn[0]
    if first.shape == own.shape and all(torch.equal(one, first) for one in drawn):
        return first  # drawn with the same seed on all replicas
    if len(drawn) == 1:
        return None
    if not first.dim() or any(one.dtype != first.dtype or one.dim() != first.dim() for one in drawn):
        return None
    if not order and (whole := _along_one_dimension(drawn, own)) is not None:
        return whole
    if any(one.shape[1:] != first.shape[1:] for one in drawn):
        return None
    before = itertools.accumulate((len(one) for one in drawn), initial=0)
    whole = torch.cat([one + start if order else one for one, start in zip(drawn, before, strict=False)])
    a_row_each = all(count in (None, len(one)) for one, count in zip(drawn, rows, strict=True))
    return whole if whole.shape == own.shape or a_row_each else None


def _along_one_dimension(drawn: Sequence[Tensor], own: Tensor) -> Tensor | None:
    """Return the draws concatenated to the shape of ``own`` along any dimension: the batch need not be dimension 0."""
    for at in range(drawn[0].dim()):
        rest = {(*one.shape[:at], *one.shape[at + 1 :]) for one in drawn}
        if len(rest) == 1 and (whole := torch.cat(list(drawn), at)).shape == own.shape:
            return whole
    return None
