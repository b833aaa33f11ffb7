"""Seeds of lives that are lived again in every run.

A seed means another life once the simulation itself has changed. So a bug that a life has found also becomes a mutant
(``mutants.py``), and the seed that finds the mutant is found again by ``make simulate RUN=mutants.py``.
"""

from __future__ import annotations

#: Seeds that once broke a law, each with what was wrong.
KEPT = {
    4: "a worker could not resume when a server lacked its last two pushes",
    17: "a power cut left zeros in a journal, and the replica that had the records was not asked",
    18: "a worker asked for its place before a server had its state back, and began again on trained weights",
    45: "a full disk failed the start of a server with a traceback",
    71: "a restarted job went on with one server's state lost, and the others' kept",
    104: "a worker took a server that had lost its state for the one that it knew, because another had opened the job",
    122: "a worker waited for ever for initial values of a server that had lost them in a power cut",
}

#: By mutant: a seed whose life finds it.
FOUND_BY = {
    "no dedup of pushes": 2,
    "change applied and not journaled when large": 1,
    "one segment too many swept": 0,
    "failed write left in the journal": 5,
    "short write taken for a whole one": 0,
    "delta after a snapshot that failed": 5,
    "held pushes left out of snapshots": 1,
    "commits left out of the journal": 1,
    "failed change taken for an applied one": 2,
    "requests lost with their connection": 2,
    "two states of a worker kept": 5,
    "lost state not named to a worker": 7,
}
