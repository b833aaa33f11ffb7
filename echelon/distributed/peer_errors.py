"""``translate_peer_errors``: converts the error of a lost peer into a one-line ``PeerLost``."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType

from echelon.base.errors import PeerLost, first_line
from echelon.distributed.rank_main import caused_by_peer


class translate_peer_errors:
    """Context manager for code that communicates with other ranks.

    here:  function that returns the position of this rank for the message

    It is a class and not a generator because it runs in every step.
    """

    __slots__ = ("_here",)

    def __init__(self, here: Callable[[], str]) -> None:
        self._here = here

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or not caused_by_peer(error):
            return
        # "[file:line] Read error [address]: Connection reset by peer. Advice ...": keep the middle part
        what = re.sub(r"^\[[^]]*:\d+\] ", "", first_line(error)).partition(". ")[0]
        raise PeerLost(f"{self._here()}: lost contact with another rank ({what}); see its log") from None
