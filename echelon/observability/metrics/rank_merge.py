"""``RankMerge``: brings the numbers that ranks log together on rank 0, without a message of its own in a step.

Each step's loss message carries one more number: how many ranks have numbers to merge. In the step after a record the
ranks look at it; if it is not zero, each sends its numbers up to that record to rank 0 through the store. So no rank
waits for a name that another does not log, and a script that logs nothing pays for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from echelon.observability.metrics.deferred_scalar import DeferredScalar
from echelon.observability.metrics.logged_numbers import LoggedNumbers, Merged, RankNumbers, merge
from echelon.observability.metrics.rank_mailbox import STORE_ERRORS, RankMailbox, next_number

#: Seconds that rank 0 waits at the end for ranks that have not ended yet.
PATIENCE = 10.0
END, LOGGED_SOME, CLOSED = "end", "some", "closed"


class RankMerge:
    """One rank's side of merging logged numbers.

    numbers: numbers that this rank has logged
    write:   callback for merged numbers, on rank 0
    say:     callback for one line, on any rank
    """

    def __init__(
        self, rank: int, numbers: LoggedNumbers, write: Callable[[Merged], None], say: Callable[[str], None]
    ) -> None:
        self._rank, self._numbers, self._write, self._say = rank, numbers, write, say
        self._mailbox: RankMailbox | None = None
        self.replica = 0
        self._has_joined = False
        self._is_left_out = False  # True if the numbers of this rank never count
        self._every = 0
        self._asked: tuple[int, DeferredScalar] | None = None  # a GPU still computes how many ranks have numbers
        self._round = 0
        self._open: list[tuple[int, RankNumbers]] = []  # rank 0: rounds whose letters have not all come
        self._has_logged = False

    def join(self, replica: int, ranks: Sequence[int] | None, every: int) -> None:
        """Set the ranks that merge; before that and without ``ranks``, only rank 0's own numbers count.

        replica: index of the batch that this rank reads
        ranks:   ranks that share this rank's loss; None if it steps alone
        every:   steps between two records, the same on all ranks
        """
        self._has_joined, self.replica, self._every = True, replica, every
        number = next_number()
        if ranks is not None and 0 in ranks:
            self._mailbox = RankMailbox(self._rank, ranks, number)
        self._is_left_out = self._mailbox is None and self._rank != 0

    def logged(self) -> None:
        """Attend to numbers that were just logged."""
        if self._is_left_out:
            self._numbers.take()
        elif self._mailbox is None:
            if self._has_joined and not self._numbers.has_deferred:
                self._write_own()
        elif not self._has_logged:
            self._has_logged = True
            self._guarded(lambda mailbox: mailbox.mark(LOGGED_SOME))

    def after_step(self, step: int, pending: Tensor | float) -> None:
        """Merge what is due after a step.

        pending: number of ranks that had numbers to merge when the loss of the step was sent
        """
        if self._mailbox is None:
            if self._numbers:
                self._write_own()
            return
        if self._asked is not None:
            (until, count), self._asked = self._asked, None
            self._exchange(until, count.read())
        if step > 1 and (step - 1) % self._every == 0:
            if isinstance(pending, Tensor) and pending.is_cuda:
                self._asked = step - 1, DeferredScalar(pending, "ranks that have logged numbers")
            else:
                self._exchange(step - 1, float(pending))
        if self._open:
            self._guarded(self._read)

    def close(self, failed: bool) -> None:
        """Merge the remaining numbers; after a failure they are dropped, because other ranks may be gone."""
        if failed:
            return
        if self._mailbox is not None:
            self._guarded(self._end)
        elif self._rank == 0:
            self._write_own()

    def _write_own(self) -> None:
        self._write(merge([self._own(None)]))

    def _own(self, until: int | None) -> RankNumbers:
        return RankNumbers(self._rank, self.replica, self._numbers.take(until))

    def _exchange(self, until: int, pending: float) -> None:
        if pending:
            self._round += 1
            own = self._own(until)
            if self._rank == 0:
                self._open.append((self._round, own))
            else:
                self._guarded(lambda mailbox: mailbox.send(str(self._round), own[1:]))

    def _read(self, mailbox: RankMailbox) -> None:
        """Write the rounds whose letters have all come, in order."""
        while self._open and not mailbox.missing(str(self._open[0][0])):
            round_, own = self._open.pop(0)
            self._write(merge([own, *_letters(mailbox, str(round_))]))

    def _end(self, mailbox: RankMailbox) -> None:
        own = self._own(None)
        if self._rank:
            mailbox.send(END, own[1:])
            if own.numbers and mailbox.is_marked(CLOSED):
                self._say(f"log: rank {self._rank} logged numbers after rank 0 was closed; they are not recorded")
            return
        if own.numbers or self._round or mailbox.is_marked(LOGGED_SOME):
            late = mailbox.wait(END, PATIENCE)
            if late:
                ranks = ", ".join(map(str, late))
                self._say(f"log: rank {ranks} has not ended after {PATIENCE:g} s; its last numbers are not recorded")
            for round_, earlier in self._open:
                self._write(merge([earlier, *_letters(mailbox, str(round_))]))
            self._open = []
            self._write(merge([own, *_letters(mailbox, END)]))
        mailbox.mark(CLOSED)

    def _guarded(self, act: Callable[[RankMailbox], None]) -> None:
        """Use the mailbox; without its store, rank 0's own numbers count from now on."""
        if self._mailbox is None:
            return
        try:
            act(self._mailbox)
        except STORE_ERRORS as error:
            self._mailbox, self._is_left_out = None, self._rank != 0
            if self._has_logged:
                self._say(f"log: numbers are not merged over ranks any more, rank 0's count: {error}")
            for _, own in self._open:
                self._write(merge([own]))
            self._open = []


def _letters(mailbox: RankMailbox, subject: str) -> list[RankNumbers]:
    return [
        RankNumbers(rank, replica, [(step, name, rule, value) for step, name, rule, value in numbers])
        for rank, (replica, numbers) in mailbox.read(subject).items()
    ]
