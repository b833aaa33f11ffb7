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
    "one segment too many swept": 5,
    "failed write left in the journal": 5,
    "short write taken for a whole one": 0,
    "delta after a snapshot that failed": 5,
    "held pushes left out of snapshots": 1,
    "commits left out of the journal": 1,
    "failed change taken for an applied one": 2,
    "requests lost with their connection": 2,
    "two states of a worker kept": 5,
    "lost state not named to a worker": 64,
    "snapshot not synced before its manifest": 4,
    "manifest not synced before its rename": 4,
    "lost push of a dropped worker waited for": 98,
    "later process of a directory not noticed": 5,
    "rows of one server alone loaded by another number": 0,
    "rows expire by the host's clock": 21,
}

#: The same for launchers.
LAUNCHER_KEPT = {
    142: "a launcher ended with a traceback when it lost a second store before it had a place in a round",
    193: "two losses of a store before the next round were both called restart 2",
    262: "a host that came back to a store took its old place in a round that had ended for it",
    334: "a host stopped by Ctrl-C ended its ranks before it told the others, who counted a restart",
    345: "a launcher that came back while the others were away waited alone at its own store",
    621: "two launchers that lacked hosts went to each other's stores",
    6184: "a store lost between two rounds, or by a spare, was counted as a restart of the job",
}
LAUNCHER_FOUND_BY = {
    "restarts not counted": 5,
    "one restart too many": 3,
    "explained failure tried again": 0,
    "every host with an outcome of its own": 0,
    "lost host not noticed": 0,
    "newcomers not noticed": 38,
    "lost peer taken for a failure": 38,
    "secondary failure named": 0,
    "ranks of a lost round not ended": 0,
    "done when the own ranks are done": 18,
    "number of the round not counted": 6,
    "more hosts than asked for": 1,
    "spare not told that the job is over": 39,
    "exit code 1 for every failure": 3,
    "ranks ended before the others know": 907,
    "lone launcher waits at its own store": 38,
    "old token at a store come back to": 265,
    "place sought in a round without this host": 58,
    "store lost between rounds counted": 6184,
}
