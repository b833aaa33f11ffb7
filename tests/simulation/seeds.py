"""Seeds of lives that once broke a law, each with what was wrong. Every run lives them again."""

from __future__ import annotations

KEPT = {
    4: "a worker could not resume when a server lacked its last two pushes",
    17: "a power cut left zeros in a journal, and the replica that had the records was not asked",
    18: "a worker asked for its place before a server had its state back, and began again on trained weights",
    41: "a disk error on one server made a worker's state too new to resume from",
    71: "a restarted job went on with one server's state lost, and the others' kept",
    74: "a full disk failed a start with a traceback",
    104: "a worker took a server that had lost its state for the one that it knew, because another had opened the job",
    122: "a worker waited for ever for initial values of a server that had lost them in a power cut",
}
