"""Before step 0 every rank shows its Plan, and in the first steps which call it makes; ranks that differ are told where
they part."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.base.environment import CHECK
from echelon.base.errors import DataError, MismatchError
from echelon.data.fingerprint import DatasetFingerprint
from echelon.distributed.activity import activity, calling
from echelon.distributed.collectives import gather_json
from echelon.engine.batch_comparison import DuplicateBatchCheck
from echelon.observability.stall.diagnose import advice
from echelon.plan import Plan
from echelon.plan.plan import first_difference

#: Steps in which all ranks say what they call before they begin; with ECHELON_CHECK=1 in all of them.
FIRST_STEPS = 3
#: Calls that a loop makes in every step. Others are rare, and always answer the roll.
PER_STEP = frozenset({"step", "update", "reduce", "grad_norm", "clip_grad_norm_", "clip_grad_value_"})


def check_same_plan(plan: Plan, group: dist.ProcessGroup) -> None:
    """Raise on every rank when one rank's plan differs from rank 0's, naming the first such rank and difference."""
    hashes = gather_json(plan.hash, group)
    strangers = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if not strangers:
        return
    plans = gather_json(json.loads(plan.to_json()), group)
    rank = strangers[0]
    where = first_difference(plans[rank], plans[0])
    raise MismatchError(
        f"rank {rank} was built differently from rank 0: {where}; "
        "every rank must build the same model, optimizer and strategy"
    )


def check_same_batch(batch: Any, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
    """Raise when the ranks that work on one batch together were given different ones."""
    if group is None:
        return
    found = gather_json([_looks(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], group)
    members = sorted(ranks)
    strangers = [rank for rank, looks in zip(members, found, strict=True) if looks != found[0]]
    if strangers:
        together = ", ".join(map(str, members))
        raise DataError(
            f"rank {strangers[0]} was given another batch than rank {members[0]}, but ranks {together} work on one "
            "batch together; take batches from engine.loader(), of data that is the same on all of them"
        )


def _looks(leaf: Tensor) -> list[Any]:
    values = leaf.detach()
    total = float(values.double().sum()) if values.numel() and not values.is_complex() else 0.0
    return [list(leaf.shape), str(leaf.dtype), repr(total)]


class RollCall:
    """All ranks say which call they are about to make: one that makes another would leave the rest waiting for ever.

    Steps are asked in the beginning only, to spare them the time. Rare calls always answer, and on connections of their
    own: one that meets a rank's step there waits, and the stall watch tells so; on those of training, messages of
    different calls would be taken for one another.

    make: makes these connections, on all ranks together; ``None`` where no rank waits for others
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup] | None) -> None:
        self._make = make
        self._group: dist.ProcessGroup | None = None
        self._left = FIRST_STEPS
        self._always = os.environ.get(CHECK, "") not in ("", "0")
        self._alike = DuplicateBatchCheck()

    def open(self) -> None:
        """Now, while all ranks are surely there: who makes connections to a rank that is gone waits for the time limit,
        where one that has them hears of its end at once."""
        if self._make is not None and self._group is None:
            self._group = self._make()

    @property
    def silent(self) -> bool:
        """Whether steps and updates are asked no more."""
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
        """Raise on every rank when one makes another call than rank 0, or at another step. A line of what may go on,
        but is hardly meant.

        what:    what else must be the same: which optimizer
        sharers: the ranks that were given one batch together
        data:    what is dealt out to all ranks, one data set after the other
        fed:     what the script has fed this rank by itself, see ``DuplicateBatchCheck``
        """
        if self._make is None or not self._asked(call):
            return None
        self.open()
        assert self._group is not None
        shapes = [list(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] if sharers else []
        mine = [call, step, what, list(sharers), shapes, list(data), list(fed)]
        found = gather_json(mine, self._group, "roll call", f"{call}()")
        _compare_calls(found)
        _compare_shapes(found)
        remarks = [_compare_data(each) for each in zip(*(one[5] for one in found), strict=False)]
        return next(filter(None, remarks), None) or self._alike.remark([one[6] for one in found])

    def _asked(self, call: str) -> bool:
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
    """Each rank takes its share of an order that it makes by itself: of other data, it would be a share of nothing."""
    known = {rank: DatasetFingerprint(*data) for rank, data in enumerate(found) if data is not None}
    first = min(known, default=0)
    for rank, data in known.items():
        if data.size != known[first].size:
            raise DataError(
                f"rank {rank} was given a data set of {data.size:,} samples and rank {first} one of "
                f"{known[first].size:,}; engine.loader() deals one data set out to all ranks: give each the same"
            )
    strangers = [rank for rank, data in known.items() if data != known[first]]
    if not strangers:
        return None
    if known[strangers[0]].read != known[first].read:
        return (
            f"rank {strangers[0]} reads other samples from its stream than rank {first}; engine.loader() lets all "
            "ranks read one stream, of which each keeps its share: let the stream not go by the rank, or add rank=0, "
            "world_size=1 where each rank keeps all that it reads"
        )
    if known[strangers[0]].contents == known[first].contents:
        return (
            f"the sampler of rank {strangers[0]} draws another order than that of rank {first}; engine.loader() deals "
            "one order out to all ranks: let the sampler draw from torch, numpy or random, or from a generator with "
            "one seed on all ranks"
        )
    return (
        f"rank {strangers[0]} was given another data set than rank {first}; engine.loader() deals one data set out to "
        "all ranks: make random data and random splits before distribute(), after which every rank has random numbers "
        "of its own"
    )


class CollectiveCaller(Protocol):
    """What makes calls that all ranks make together."""

    steps: int

    def answer_roll(self, call: str, *args: Any, **named: Any) -> None: ...


Call = TypeVar("Call", bound=Callable[..., Any])


def collective_call(phase: str) -> Callable[[Call], Call]:
    """For a call that all ranks make together: others can see that this rank is in it, and it begins with the roll."""

    def wrap(method: Call) -> Call:
        call = method.__name__

        @functools.wraps(method)
        def called(self: CollectiveCaller, *args: Any, **named: Any) -> Any:
            inner = bool(activity.call)
            with calling(call, self.steps + 1, phase):
                if not inner:
                    self.answer_roll(call, *args, **named)
                return method(self, *args, **named)

        return cast(Call, called)

    return wrap
