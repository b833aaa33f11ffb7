"""Tasks: what a batch is, and how an output is judged.

Every loss is a mean over samples of a loss of each sample alone. So a batch may be cut in any way, over replicas and
micro-batches, and the numbers stay those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from echelon.base.errors import UsageError, nearest
from echelon.nn import Packed, mean_over_samples

OWN = "own"  #: the task of a model that brings its own loss

IGNORED = -100  #: a label that counts for nothing: padding, and positions that are not asked for

AUXILIARY_WEIGHT = 0.4  #: of an inception's second classifier (Szegedy et al. 2015 has 0.3; slim has 0.4)


@dataclass(frozen=True, kw_only=True)
class Task:
    """batch:  the tensors of a batch, the target last; what comes before it is what the model is called with
    metrics:  by name, as ``engine.evaluate`` takes them; the first is the one a run ends by naming
    unit:     what is counted per second
    """

    batch: str
    loss: Callable[[Any, Any], Tensor]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "examples"


def classification(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy. In training an inception also hands out the logits of its auxiliary classifier."""
    if isinstance(output, tuple):
        logits, auxiliary = output
        return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)
    return F.cross_entropy(output, labels)


def smoothed(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy with a tenth of the label spread over all classes."""
    if isinstance(output, tuple):
        return smoothed(output[0], labels) + AUXILIARY_WEIGHT * smoothed(output[1], labels)
    return F.cross_entropy(output, labels, label_smoothing=0.1)


def tokens(logits: Tensor, labels: Tensor | Packed) -> Tensor:
    """Mean over sequences of each sequence's mean over its own labelled positions. [n, s, vocabulary], [n, s].

    Packed labels have logits [t, vocabulary], and the same loss.
    """
    if isinstance(labels, Packed):
        each = F.cross_entropy(logits.float(), labels.values, ignore_index=IGNORED, reduction="none")
        return mean_over_samples(each, labels, labels.values != IGNORED)
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).sum(1).clamp(min=1)
    return (each.view_as(labels).sum(1) / counted).mean()


def pretraining(output: tuple[Tensor, Tensor], target: tuple[Tensor | Packed, Tensor]) -> Tensor:
    """BERT's two losses: the masked words [n, p, vocabulary], and whether the second sentence follows [n, 2]."""
    (words, follows), (labels, next_sentence) = output, target
    return tokens(words, labels) + F.cross_entropy(follows.float(), next_sentence)


def span(logits: Tensor, target: Tensor) -> Tensor:
    """Where the answer begins and ends: [n, s, 2], and [n, 2] positions."""
    begins, ends = logits.float().unbind(-1)
    return 0.5 * (F.cross_entropy(begins, target[:, 0]) + F.cross_entropy(ends, target[:, 1]))


def clicked(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels)


def masked_accuracy(output: tuple[Tensor, Tensor], target: tuple[Tensor | Packed, Tensor]) -> Tensor:
    """Part of each sequence's masked words that were guessed."""
    return token_accuracy(output[0], target[0])


def token_accuracy(logits: Tensor, labels: Tensor | Packed) -> Tensor:
    """Part of each sequence's labelled positions that were guessed; where they are packed, the mean of these parts."""
    if isinstance(labels, Packed):
        guessed = logits.argmax(-1) == labels.values
        return mean_over_samples(guessed.float(), labels, labels.values != IGNORED)
    right = (logits.argmax(-1) == labels).sum(1)
    return right / (labels != IGNORED).sum(1).clamp(min=1)


def exact_span(logits: Tensor, target: Tensor) -> Tensor:
    """1 where both ends of the answer were found."""
    return (logits.argmax(1) == target).all(1).float()


def _no_loss(output: Any, target: Any) -> Tensor:
    raise UsageError(
        "--task own: there is no loss; give --loss_name file.py:name, or the model's class a static 'loss'"
    )


TASKS: dict[str, Task] = {
    "classify": Task(
        batch="inputs of any kind, labels [n]",
        loss=classification,
        metrics={"accuracy": "accuracy", "top5": "top5"},
    ),
    OWN: Task(batch="inputs of any kind, the target", loss=_no_loss),
    "classify_images": Task(
        batch="images [n, 3 or 1, h, w] (floats, or bytes that become floats on the device), labels [n]",
        loss=classification,
        metrics={"accuracy": "accuracy", "top5": "top5"},
        unit="images",
    ),
    "classify_features": Task(
        batch="features [n, d], labels [n]", loss=classification, metrics={"accuracy": "accuracy", "top5": "top5"}
    ),
    "regress": Task(batch="features [n, d], values [n, k]", loss=F.mse_loss),
    "masked_lm": Task(
        batch="tokens [n, s], segments [n, s], mask [n, s] (1: a token, 0: padding), positions [n, p] of masked words, "
        "(their tokens [n, p], whether the second sentence follows [n])",
        loss=pretraining,
        metrics={"accuracy": masked_accuracy},
        unit="sequences",
    ),
    "classify_text": Task(
        batch="tokens [n, s], segments [n, s], mask [n, s], labels [n]",
        loss=classification,
        metrics={"accuracy": "accuracy"},
        unit="sequences",
    ),
    "answer_span": Task(
        batch="tokens [n, s], segments [n, s], mask [n, s], first and last token of the answer [n, 2]",
        loss=span,
        metrics={"accuracy": exact_span},
        unit="sequences",
    ),
    "language_model": Task(
        batch="tokens [n, s], the tokens that follow them [n, s]",
        loss=tokens,
        metrics={"accuracy": token_accuracy},
        unit="sequences",
    ),
    "translate": Task(
        batch="source [n, s], mask of the source [n, s], target moved by one [n, t], target [n, t]",
        loss=tokens,
        metrics={"accuracy": token_accuracy},
        unit="sequences",
    ),
    "click": Task(
        batch="ids [n, slots] of any int64, numbers [n, d], labels [n] (0 or 1)", loss=clicked, metrics={"auc": "auc"}
    ),
    "word_pairs": Task(
        batch="words [n], others [n, 1 + k], which of the others are real neighbours [n, 1 + k] (0 or 1)",
        loss=clicked,
        metrics={"accuracy": lambda logits, labels: ((logits > 0) == (labels > 0.5)).float().mean(1)},
        unit="pairs",
    ),
}

#: ``--loss_name``: "example" is the task's own
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"label_smoothing": smoothed}


def loss_of(task: str, name: str, own: Callable[[Any, Any], Tensor] | None = None) -> Callable[[Any, Any], Tensor]:
    """The loss that ``--loss_name`` asks for; "example" is the model's ``own``, else the task's."""
    if name == "example":
        return own or TASKS[task].loss
    if ":" in name:
        from echelon.zoo.own.loss import own_loss

        return own_loss(name)
    if name not in LOSSES:
        known = ["example", *LOSSES]
        raise UsageError(f"--loss_name '{name}' is unknown{nearest(name, known)} (one of your own is file.py:name)")
    if TASKS[task].loss is not classification:
        raise UsageError(f"--loss_name {name} is for classification, and this run learns '{task}'; leave it out")
    return LOSSES[name]
