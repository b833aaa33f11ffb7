"""Which witness a process has, and what cannot be verified at all."""

from __future__ import annotations

from torch import nn

from echelon.nn import SparseEmbedding
from echelon.strategy import Strategy
from echelon.tools.verify.float64 import widen
from echelon.tools.verify.messages import Question, find_question
from echelon.tools.verify.observer import Witness
from echelon.tools.verify.randomness import still
from echelon.tools.verify.replayer import Replayer
from echelon.tools.verify.run_recorder import Recorder

_begun: list[Question] = []


def find_witness(model: nn.Module, strategy: Strategy | None) -> Witness | None:
    """For the model that the script distributes, which is made to sit still for it."""
    question = find_question()
    if question is None:
        return None
    if _begun:
        question.refuse("the script calls distribute() more than once, and verify follows one model; verify them apart")
    if (strategy and strategy.ps) or any(isinstance(module, SparseEmbedding) for module in model.modules()):
        question.refuse(
            "parameter servers are not followed: verify the model without them (mode 'sync' equals one process; what "
            "'async' and 'geo' come to depends on who comes first)"
        )
    _begun.append(question)
    silenced = still(model)
    if question.wide:
        widen(model)
    return Recorder(question, silenced) if question.role == "plan" else Replayer(question)
