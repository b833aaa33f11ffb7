"""Losses and metrics of recommenders: clicks, conversions, retrieval with the batch's negatives, and next items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn import gather_batch
from echelon.parallel.evaluate import Overall, area_under_curve, scored

#: Metrics of a model of clicks, by name.
CLICK_METRICS: dict[str, Any] = {"auc": "auc", "ne": "ne", "calibration": "calibration"}


def clicked(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels)


def clicked_and_converted(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the two labels' losses: logits and labels [n, 2]."""
    each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return each.sum(1).mean()


def retrieval(output: tuple[Tensor, Tensor, Tensor], log_share: Tensor) -> Tensor:
    """Return the softmax loss of each user's item among all items of the global batch.

    output:    vectors of users and items, [n, d], and the items' ids [n]
    log_share: log of each item's share of the training data, [n], by which the scores of frequent items are corrected;
               0 corrects nothing
    """
    scores = _batch_scores(output, log_share)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def batch_hits(output: tuple[Tensor, Tensor, Tensor], log_share: Tensor) -> Tensor:
    """Return 1 for every user whose own item has the highest score in the global batch, else 0."""
    scores = _batch_scores(output, torch.zeros_like(log_share))
    return (scores.argmax(1) == torch.arange(len(scores), device=scores.device)).float()


def _batch_scores(output: tuple[Tensor, Tensor, Tensor], log_share: Tensor) -> Tensor:
    """Return each user's score for each item of the batch.

    An item that is the user's own one once more is no negative: its score is the lowest possible.
    """
    users, offers, items, log_share = gather_batch(*output, log_share)
    scores = users @ offers.T - log_share
    same = (items[:, None] == items[None, :]) & ~torch.eye(len(items), dtype=torch.bool, device=items.device)
    return scores.masked_fill(same, torch.finfo(scores.dtype).min)


def next_items(scores: Tensor, is_there: Tensor) -> Tensor:
    """Return the mean over sequences of the mean loss of their places: scores [n, s, 1 + k], the next item first.

    The loss of a place is the binary cross-entropy of the next item and of each random one, added up.
    """
    right = torch.zeros_like(scores)
    right[..., 0] = 1
    each = F.binary_cross_entropy_with_logits(scores, right, reduction="none").sum(2) * is_there
    return (each.sum(1) / is_there.sum(1).clamp(min=1)).mean()


def last_hits(scores: Tensor, is_there: Tensor) -> Tensor:
    """Return 1 for every sequence whose last place has its next item above all random ones, else 0."""
    last = scores[:, -1]
    return (last[:, :1] > last[:, 1:]).all(1).float()


def auc_of(label: int) -> Overall:
    """Return the area under the curve of one of several labels."""

    def keep(logits: Tensor, labels: Tensor) -> Tensor:
        return scored(logits[:, label], labels[:, label])

    return Overall(keep, area_under_curve)


#: Task -> (layout of a batch, loss, metrics, unit).
RECOMMENDER_TASKS: dict[str, tuple[str, Callable[[Any, Any], Tensor], dict[str, Any], str]] = {
    "click": (
        "ids [n, slots] of any int64, numbers [n, d], labels [n] (0 or 1)",
        clicked,
        CLICK_METRICS,
        "examples",
    ),
    "click_history": (
        "ids [n, slots], numbers [n, d], candidate item [n], items before [n, s] (0: none), labels [n]",
        clicked,
        CLICK_METRICS,
        "examples",
    ),
    "click_and_conversion": (
        "ids [n, slots], numbers [n, d], labels [n, 2]: clicked, converted",
        clicked_and_converted,
        {"auc": auc_of(0), "auc_conversion": auc_of(1)},
        "examples",
    ),
    "retrieve": (
        "ids of users [n, u], ids of items [n, k] (the first names the item), tags of items (ragged, or [n, t] padded "
        "with 0), log of the item's share of the data [n] (0: no correction)",
        retrieval,
        {"accuracy": batch_hits},
        "examples",
    ),
    "next_item": (
        "items [n, s] (0: none, at the beginning), the next item and random ones [n, s, 1 + k], places that count "
        "[n, s] (0 or 1)",
        next_items,
        {"accuracy": last_hits},
        "sequences",
    ),
}
