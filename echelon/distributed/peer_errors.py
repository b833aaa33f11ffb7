"""Around what talks to other ranks: a peer that is gone is told in a line of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType

from echelon.base.errors import PeerLost
from echelon.distributed.rank_main import caused_by_peer


class translate_peer_errors:
    """``here`` says where this rank is, for the line. Around every step, hence no generator."""

    __slots__ = ("_here",)

    def __init__(self, here: Callable[[], str]) -> None:
        self._here = here

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or not caused_by_peer(error):
            return
        # "[file:line] Read error [address]: Connection reset by peer. Advice ..." without its ends
        what = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0]).partition(". ")[0]
        raise PeerLost(f"{self._here()}: lost contact with another rank ({what}); see its log") from None
