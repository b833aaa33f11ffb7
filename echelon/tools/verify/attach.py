"""Selection of the observer for a process that ``echelon verify`` has started; refuses what cannot be verified."""

from __future__ import annotations

from torch import nn

from echelon.nn import SparseEmbedding
from echelon.strategy import Strategy
from echelon.tools.verify.float64 import widen
from echelon.tools.verify.observer import VerifyObserver
from echelon.tools.verify.randomness import disable_dropout
from echelon.tools.verify.replayer import VerifyReplayer
from echelon.tools.verify.run_recorder import VerifyRecorder
from echelon.tools.verify.verify_request import VerifyRequest, find_verify_request

_begun: list[VerifyRequest] = []


def find_verify_observer(model: nn.Module, strategy: Strategy | None) -> VerifyObserver | None:
    """Return the observer for the model that the script distributes; None outside of ``echelon verify``.

    Dropout in the model is switched off; the model is converted to float64 if the request says so.
    """
    question = find_verify_request()
    if question is None:
        return None
    if _begun:
        question.refuse("the script calls distribute() more than once, and verify follows one model; verify them apart")
    if (strategy and strategy.ps) or any(isinstance(module, SparseEmbedding) for module in model.modules()):
        question.refuse(
            "parameter servers are not followed: verify the model without them (mode 'sync' equals one process; the "
            "result "
            "of 'async' and 'geo' depends on the order of arrival)"
        )
    _begun.append(question)
    silenced = disable_dropout(model)
    if question.wide:
        widen(model)
    return VerifyRecorder(question, silenced) if question.role == "plan" else VerifyReplayer(question)
