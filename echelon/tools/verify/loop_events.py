"""What a loop of one's own takes in: batches of its loaders and random numbers, in the order in which they come.

``engine.step(batch)`` shows what a step computes with. A loop that calls the model itself does not; but it is a
function of what it is given. So the ranks' loops are listened to, and the loop in one process is given the same, the
replicas' rows one below the other.
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
#: They draw, and put out what their input makes of it: no tensor to take down and hand out again.
_STRAY = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu",
          "gumbel_softmax")  # fmt: skip


class DrawFollower(Protocol):
    """Told of random tensors; what it returns is what the caller gets.

    quiet: a loader is at work, whose batches are followed and not what it draws
    """

    quiet: bool

    def drawn(self, own: Tensor, name: str) -> Tensor: ...

    def strayed(self, name: str) -> None: ...


class LoopFollower(DrawFollower, Protocol):
    """Told of everything that comes in; what it returns is what the loop gets."""

    def batches(self, own: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]: ...


_PLAIN = DataLoader.__iter__


class RandomDrawMode(TorchFunctionMode):
    """While it is open, random tensors go through the follower."""

    def __init__(self, follower: DrawFollower) -> None:
        super().__init__()
        self._draws = follower

    @property
    def is_off(self) -> bool:
        """Return True where nothing is to be followed; in a graph that is being compiled nothing can be."""
        return self._draws.quiet or torch.compiler.is_compiling()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.is_off:
            return found
        if name in _STRAY and _drops(name, tuple(args), kwargs or {}):
            self._draws.strayed(name)
        elif name in _MADE or name in FILLED:
            return self._draws.drawn(found, name)
        return found


class LoopInputMode(RandomDrawMode):
    """While it is open, random tensors made outside of the engine's own calls go through the follower, and so do
    batches of torch's data loaders."""

    def __init__(self, follower: LoopFollower, wide: bool) -> None:
        super().__init__(follower)

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if activity.call or follower.quiet:
                return _PLAIN(loader)
            return widened_each(follower.batches(lambda: _PLAIN(loader), loader), wide)

        self._iterate = iterate

    def open(self) -> None:
        """From here on, in this thread: the loop that follows is the user's own code, with no ``with`` around it."""
        self.__enter__()  # type: ignore[no-untyped-call]
        DataLoader.__iter__ = self._iterate  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        DataLoader.__iter__ = _PLAIN  # type: ignore[method-assign]
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def is_off(self) -> bool:
        return bool(activity.call) or super().is_off


def _drops(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether a call of such a function, or of the native one below it, draws at all."""
    if name == "gumbel_softmax":
        return True
    part = named.get("p", args[1] if len(args) > 1 else 0.5)
    training = named.get("training", args[2] if len(args) > 2 else True)
    return bool(training) and (name == "rrelu" or bool(part))


def widened_each(batches: Iterator[Any], wide: bool) -> Iterator[Any]:
    return (to_float64(batch) if wide else batch for batch in batches)


class FollowedLoader(Loader):
    """A loader whose batches go through the follower: another class for the same object.

    share: samples of the batch at hand that count
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
    """The length of the first tensor that has one."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)


def put_together(
    drawn: Sequence[Tensor], own: Tensor, rows: Sequence[int | None], *, order: bool = False
) -> Tensor | None:
    """What the replicas drew, one below the other; None where that is no draw of a batch.

    rows:  of the replicas' batches, where there are any
    order: of rows (``randperm``), which have others before them in one process
    """
    first = drawn[0]
    if first.shape == own.shape and all(torch.equal(one, first) for one in drawn):
        return first  # a generator with the same seed everywhere
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
    """Return the draws side by side in the shape of ``own``: samples need not come first."""
    for at in range(drawn[0].dim()):
        rest = {(*one.shape[:at], *one.shape[at + 1 :]) for one in drawn}
        if len(rest) == 1 and (whole := torch.cat(list(drawn), at)).shape == own.shape:
            return whole
    return None
