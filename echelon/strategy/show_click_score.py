"""The score by which rows of a sparse table are kept: shows and clicks that lose weight with every pass."""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class ShowClickScore:
    """Score of a row: (shows - clicks) * ``show`` + clicks * ``click``.

    A show is an occurrence of the id in a sample; it is a click if the sample was clicked. At the end of each pass
    shows and clicks are multiplied by ``decay``, and rows whose score is then below ``threshold`` are removed.

    show:      weight of a show without a click, default 0.1
    click:     weight of a click, default 1.0
    decay:     factor of shows and clicks at the end of a pass, default 0.98
    threshold: lowest score with which a row stays, default 0.8
    clicks:    index of the tensor of a batch that tells which samples were clicked, default -1, the last one

    >>> embedding = echelon.nn.SparseEmbedding(16, score=echelon.nn.ShowClickScore(threshold=0.5))
    """

    show: float = 0.1
    click: float = 1.0
    decay: float = 0.98
    threshold: float = 0.8
    clicks: int = -1

    def __post_init__(self) -> None:
        require(self.show >= 0, self, "show", "0 or more")
        require(self.click >= 0, self, "click", "0 or more")
        require(0 < self.decay <= 1, self, "decay", "a factor above 0, up to 1")
        require(self.threshold >= 0, self, "threshold", "0 or more")
