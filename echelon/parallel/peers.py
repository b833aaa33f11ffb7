"""Around what talks to other ranks: a peer that is gone is told in a line of ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from echelon.errors import PeerLost
from echelon.launch.worker import caused_by_peer


@contextlib.contextmanager
def peers_explained(here: Callable[[], str]) -> Iterator[None]:
    """``here`` says where this rank is, for the line."""
    try:
        yield
    except RuntimeError as error:
        if not caused_by_peer(error):
            raise
        # "[file:line] Read error [address]: Connection reset by peer. Advice ..." without its ends
        what = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0]).partition(". ")[0]
        raise PeerLost(f"{here()}: lost contact with another rank ({what}); see its log") from None
