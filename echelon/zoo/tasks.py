"""Tasks: the layout of a batch, the loss and the metrics of each kind of training.

Every loss is a mean over samples, and the loss of a sample depends on that sample only. So a batch may be divided in
any way over replicas and micro-batches, and the numbers equal those of one process. ``retrieve`` compares samples; it
gathers the batch of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from echelon.base.errors import UsageError, nearest
from echelon.nn import Packed, mean_over_samples
from echelon.zoo.recommender_tasks import RECOMMENDER_TASKS, clicked

OWN = "own"  #: the task of a model with its own loss

IGNORED = -100  #: the label of positions that the loss ignores: padding and unlabelled positions

AUXILIARY_WEIGHT = 0.4  #: weight of an inception's auxiliary classifier (0.3 in Szegedy et al. 2015, 0.4 in slim)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of training.

    batch:   description of the tensors of a batch: the inputs of the model, then the target
    loss:    function of (output, target)
    metrics: metrics by name, for ``engine.evaluate``; the last line of a run reports the first one
    unit:    unit of the throughput, default "examples"
    """

    batch: str
    loss: Callable[[Any, Any], Tensor]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "examples"


def classification(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy; in training an inception also outputs the logits of its auxiliary classifier."""
    if isinstance(output, tuple):
        logits, auxiliary = output
        return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)
    return F.cross_entropy(output, labels)


def smoothed(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy with label smoothing of 0.1."""
    if isinstance(output, tuple):
        return smoothed(output[0], labels) + AUXILIARY_WEIGHT * smoothed(output[1], labels)
    return F.cross_entropy(output, labels, label_smoothing=0.1)


def tokens(logits: Tensor, labels: Tensor | Packed) -> Tensor:
    """Return the mean over sequences of the mean cross-entropy of each sequence's labelled positions.

    The shapes are [n, s, vocabulary] and [n, s]. Packed labels have logits [t, vocabulary] and give the same loss.
    """
    if isinstance(labels, Packed):
        each = F.cross_entropy(logits.float(), labels.values, ignore_index=IGNORED, reduction="none")
        return mean_over_samples(each, labels, labels.values != IGNORED)
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).sum(1).clamp(min=1)
    return (each.view_as(labels).sum(1) / counted).mean()


def pretraining(output: tuple[Tensor, Tensor], target: tuple[Tensor | Packed, Tensor]) -> Tensor:
    """Return the sum of BERT's two losses: masked words [n, p, vocabulary] and next-sentence prediction [n, 2]."""
    (words, follows), (labels, next_sentence) = output, target
    return tokens(words, labels) + F.cross_entropy(follows.float(), next_sentence)


def span(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of the answer's begin and end: logits [n, s, 2] and positions [n, 2]."""
    begins, ends = logits.float().unbind(-1)
    return 0.5 * (F.cross_entropy(begins, target[:, 0]) + F.cross_entropy(ends, target[:, 1]))


def masked_accuracy(output: tuple[Tensor, Tensor], target: tuple[Tensor | Packed, Tensor]) -> Tensor:
    """Return the fraction of masked words predicted correctly, for each sequence."""
    return token_accuracy(output[0], target[0])


def token_accuracy(logits: Tensor, labels: Tensor | Packed) -> Tensor:
    """Return the fraction of labelled positions predicted correctly, for each sequence; their mean if packed."""
    if isinstance(labels, Packed):
        guessed = logits.argmax(-1) == labels.values
        return mean_over_samples(guessed.float(), labels, labels.values != IGNORED)
    right = (logits.argmax(-1) == labels).sum(1)
    return right / (labels != IGNORED).sum(1).clamp(min=1)


def exact_span(logits: Tensor, target: Tensor) -> Tensor:
    """Return 1 for each sample whose begin and end of the answer are both correct, else 0."""
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
    **{
        name: Task(batch=batch, loss=loss, metrics=metrics, unit=unit)
        for name, (batch, loss, metrics, unit) in RECOMMENDER_TASKS.items()
    },
    "word_pairs": Task(
        batch="words [n], others [n, 1 + k], which of the others are real neighbours [n, 1 + k] (0 or 1)",
        loss=clicked,
        metrics={"accuracy": lambda logits, labels: ((logits > 0) == (labels > 0.5)).float().mean(1)},
        unit="pairs",
    ),
}

#: losses by ``--loss_name``; "example" is the loss of the task
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"label_smoothing": smoothed}


def loss_of(task: str, name: str, own: Callable[[Any, Any], Tensor] | None = None) -> Callable[[Any, Any], Tensor]:
    """Return the loss for ``--loss_name``; "example" is the model's ``own`` loss, or the task's if it is None."""
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
