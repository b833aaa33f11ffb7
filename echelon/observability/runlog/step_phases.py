"""The parts of a step's time: the one definition for console, metrics.jsonl, report and timeline.

Communication is the time in which a step is held up by messages: waits for other ranks, pipeline stages or parameter
servers in any phase (batch norm over replicas waits in forward and backward), and the phase that completes the exchange
of gradients. Messages that overlap with computing do not count. In a timeline it is exposed + bubble + server.

On a GPU the phases are timed on the device, where a message inside forward or backward cannot be told from computing;
only a timeline separates it.
"""

from __future__ import annotations

#: The phases of every step, in order, with their meaning.
PHASES = {
    "data": "between two steps: waiting for the next batch, and your own code",
    "forward": "the model, from batch to loss",
    "backward": "gradients",
    "communicate": "messages that computing does not hide, and waits for other ranks and servers",
    "update": "the optimizer",
}
#: Work between two steps that is timed apart; it is no part of a step.
BETWEEN = {
    "checkpoint": "saving checkpoints, as far as training waits for it",
    "evaluate": "evaluations",
    "timeline": "beginning and ending the recording of a timeline",
}
