"""Checks that all ranks have the same Plan and make the same collective calls.

The plans are compared before step 0, the calls in the first steps. Errors name the first difference.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.base.environment import CHECK
from echelon.base.errors import DataError, MismatchError
from echelon.data.fingerprint import DatasetFingerprint
from echelon.distributed.activity import activity, calling
from echelon.distributed.collectives import gather_json
from echelon.observability.stall.diagnose import advice
from echelon.plan import Plan
from echelon.plan.plan import first_difference

#: Number of per-step calls that all ranks compare before they begin; with ECHELON_CHECK=1 they compare all calls.
FIRST_STEPS = 3
#: Calls that a loop makes in every step. Other calls are rare and are always compared.
PER_STEP = frozenset({"step", "update", "reduce", "grad_norm", "clip_grad_norm_", "clip_grad_value_"})


def check_same_plan(plan: Plan, group: dist.ProcessGroup, on_nonfinite: object = None, own: Any = None) -> Any:
    """Raise ``MismatchError`` on every rank if a plan differs from rank 0's; the error names the first difference.

    The result is rank 0's ``own``.

    on_nonfinite: setting that must be the same, too
    own:          settings in which rank 0's hold for all ranks
    """
    found = gather_json([plan.hash, str(on_nonfinite), own], group)
    hashes, settings = ([each[i] for each in found] for i in (0, 1))
    if (other := next((rank for rank, text in enumerate(settings) if text != settings[0]), None)) is not None:
        raise MismatchError(f"rank {other} was given on_nonfinite={settings[other]}, and rank 0 {settings[0]}; give "
                            "every rank the same")  # fmt: skip
    different = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if not different:
        return found[0][2]
    plans = gather_json(json.loads(plan.to_json()), group)
    rank = different[0]
    where = first_difference(plans[rank], plans[0])
    raise MismatchError(
        f"rank {rank} was built differently from rank 0: {where}; "
        "every rank must build the same model, optimizer and strategy"
    )


def check_same_batch(batch: Any, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
    """Raise ``DataError`` if the ranks that share one batch were given different batches."""
    if group is None:
        return
    found = gather_json([_summary(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], group)
    members = sorted(ranks)
    different = [rank for rank, summary in zip(members, found, strict=True) if summary != found[0]]
    if different:
        together = ", ".join(map(str, members))
        raise DataError(
            f"rank {different[0]} was given another batch than rank {members[0]}, but ranks {together} work on one "
            "batch together; take batches from engine.loader(), of data that is the same on all of them"
        )


def _summary(leaf: Tensor) -> list[Any]:
    values = leaf.detach()
    total = float(values.double().sum()) if values.numel() and not values.is_complex() else 0.0
    return [list(leaf.shape), str(leaf.dtype), repr(total)]


class RollCall:
    """Compares the next collective call of all ranks, because ranks that make different calls would wait forever.

    Steps are compared only at the beginning, to save time. Rare calls are always compared, over a process group of
    their own. If a rare call meets a step of another rank, it waits there, and the stall detector reports it. On the
    groups of training, messages of different calls would be mixed up.

    make: function that creates the process group, called on all ranks together; ``None`` if no rank waits for others
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup] | None) -> None:
        self._make = make
        self._group: dist.ProcessGroup | None = None
        self._left = FIRST_STEPS
        self._always = os.environ.get(CHECK, "") not in ("", "0")
        self._alike = DuplicateBatchCheck()

    def open(self) -> None:
        """Create the process group now, while all ranks are alive.

        Connecting to a dead rank takes until the timeout, while an existing connection reports its end at once.
        """
        if self._make is not None and self._group is None:
            self._group = self._make()

    @property
    def silent(self) -> bool:
        """True if steps and updates are no longer compared."""
        return self._make is None or (self._left <= 0 and not self._always)

    def answer(
        self,
        call: str,
        step: int,
        what: str = "",
        batch: Any = None,
        sharers: Sequence[int] = (),
        data: Sequence[DatasetFingerprint | None] = (),
        fed: Sequence[Any] = (),
    ) -> str | None:
        """Compare this call on all ranks and return a warning for legal but probably unintended differences.

        Raises ``MismatchError`` on every rank if one rank makes another call than rank 0, or calls at another step.

        what:    other text that must be equal, such as the optimizer's name
        batch:   arguments of the call; their shapes are compared between ``sharers``
        sharers: ranks that share one batch
        data:    fingerprints of the datasets that are divided among all ranks
        fed:     description of a batch that the script itself has fed to this rank, see ``DuplicateBatchCheck``
        """
        if self._make is None or not self._compares(call):
            return None
        self.open()
        assert self._group is not None
        shapes = [list(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] if sharers else []
        local = [call, step, what, list(sharers), shapes, list(data), list(fed)]
        result = gather_json(local, self._group, "roll call", f"{call}()")
        _compare_calls(result)
        _compare_shapes(result)
        remarks = [_compare_data(each) for each in zip(*(one[5] for one in result), strict=False)]
        return next(filter(None, remarks), None) or self._alike.remark([one[6] for one in result])

    def _compares(self, call: str) -> bool:
        if self._always or call not in PER_STEP:
            return True
        self._left -= 1
        return self._left >= 0


def _compare_calls(found: list[Any]) -> None:
    for rank, one in enumerate(found):
        if one[:3] != found[0][:3]:
            raise MismatchError(
                f"rank {rank} calls {_call_in_words(one, found[0])} while rank 0 calls "
                f"{_call_in_words(found[0], one)}; {advice(one[0], found[0][0])}"
            )


def _call_in_words(one: list[Any], other: list[Any]) -> str:
    call, step, what = one[:3]
    return f"{call}({what})" + (f" (step {step})" if call in ("step", "update") or step != other[1] else "")


def _compare_shapes(found: list[Any]) -> None:
    for rank, (_, step, _, sharers, shapes, *_) in enumerate(found):
        first = min(sharers, default=rank)
        if shapes != found[first][4]:
            raise MismatchError(
                f"step {step}: rank {rank} was given a batch of shapes {shapes} and rank {first} one of "
                f"{found[first][4]}, but ranks {', '.join(map(str, sharers))} work on one batch together; give them "
                "the same"
            )


def _compare_data(found: Sequence[Any]) -> str | None:
    """Compare the datasets of all ranks and return a warning if their contents or orders differ.

    Each rank computes the global order itself and takes its share, so all ranks need the same dataset. Raises
    ``DataError`` if the sizes differ.
    """
    known = {rank: DatasetFingerprint(*data) for rank, data in enumerate(found) if data is not None}
    first = min(known, default=0)
    for rank, data in known.items():
        if data.size != known[first].size:
            raise DataError(
                f"rank {rank} was given a data set of {data.size:,} samples and rank {first} one of "
                f"{known[first].size:,}; engine.loader() deals one data set out to all ranks: give each the same"
            )
    different = [rank for rank, data in known.items() if data != known[first]]
    if not different:
        return None
    if known[different[0]].read != known[first].read:
        return (
            f"rank {different[0]} reads other samples from its stream than rank {first}; engine.loader() lets all "
            "ranks read one stream, of which each keeps its share: make the stream independent of the rank, or add "
            "rank=0, "
            "world_size=1 where each rank keeps all that it reads"
        )
    if known[different[0]].contents == known[first].contents:
        return (
            f"the sampler of rank {different[0]} draws another order than that of rank {first}; engine.loader() deals "
            "one order out to all ranks: let the sampler draw from torch, numpy or random, or from a generator with "
            "one seed on all ranks"
        )
    return (
        f"rank {different[0]} was given another data set than rank {first}; engine.loader() deals one data set out to "
        "all ranks: make random data and random splits before distribute(), after which every rank has random numbers "
        "of its own"
    )


class CollectiveCaller(Protocol):
    """An object with collective calls, such as an engine."""

    @property
    def steps(self) -> int: ...

    def _answer_roll(self, call: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Compare this call on all ranks."""


Call = TypeVar("Call", bound=Callable[..., Any])


def collective_call(phase: str) -> Callable[[Call], Call]:
    """Mark a method as a collective call: publish it as this rank's activity and compare it on all ranks first."""

    def wrap(method: Call) -> Call:
        call = method.__name__

        @functools.wraps(method)
        def called(self: CollectiveCaller, *args: Any, **named: Any) -> Any:
            inner = bool(activity.call)
            with calling(call, self.steps + 1, phase):
                if not inner:
                    self._answer_roll(call, args, named)
                return method(self, *args, **named)

        return cast(Call, called)

    return wrap


#: Consecutive steps with equal batches before the warning, because a single batch may be equal by chance.
CONFIRMED = 2


class DuplicateBatchCheck:
    """Compares the batches that the script itself, not ``engine.loader()``, feeds to the ranks.

    Each rank sends its replica index, a checksum of its batch or None, and the result of ``LoaderWatch.undealt``.
    A rank whose batch comes from ``engine.loader()`` sends an empty list.
    """

    def __init__(self) -> None:
        self._times, self._has_warned = 0, False

    def remark(self, fed: Sequence[Sequence[Any]]) -> str | None:
        """Return a warning, once, if replicas were fed the same data in ``CONFIRMED`` consecutive steps."""
        same = next(_pairs_alike(fed, 1), None)
        undealt = next(_pairs_alike(fed, 2), None)
        pair = same or undealt
        self._times = self._times + 1 if pair else 0
        if pair is None or self._has_warned or self._times < CONFIRMED:
            return None
        self._has_warned = True
        loader = fed[pair[0]][2]
        remedy = "engine.loader(loader)" if loader else "engine.loader(data)"
        if same is not None:
            return (
                f"loader: ranks {pair[0]} and {pair[1]} were given the same batches and work on the same samples; take "
                f"batches from {remedy}, which deals them out"
            )
        return (
            f"loader: ranks {pair[0]} and {pair[1]} each go through all {loader[1]:,} samples of a DataLoader, whose "
            f"sampler does not deal them out, and an epoch is as long as on one rank; take batches from {remedy} "
            "(unless each rank's data set is a part of its own)"
        )


def _pairs_alike(fed: Sequence[Sequence[Any]], at: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of ranks of different replicas whose entries at index ``at`` are equal."""
    known = [(rank, one) for rank, one in enumerate(fed) if one and one[at] is not None]
    for (first, one), (second, other) in combinations(known, 2):
        if one[0] != other[0] and one[at] == other[at]:
            yield first, second
