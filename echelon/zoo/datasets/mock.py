"""The data set ``mock``: synthetic data for every task, which a model can learn, without downloads or files."""

from __future__ import annotations

import importlib

from echelon.zoo import registry
from echelon.zoo.entry import Data, Dataset, Request

#: task -> (module, relative to ``made_up``, and the name of a function)
MADE_BY = {
    "classify_images": (".synthetic_images", "images"),
    "classify_features": (".synthetic_clicks", "features"),
    "regress": (".synthetic_clicks", "values"),
    "click": (".synthetic_clicks", "clicks"),
    "click_history": ("..click_log", "open_click_log"),
    "click_and_conversion": ("..click_log", "open_click_log"),
    "retrieve": ("..click_log", "open_click_log"),
    "next_item": ("..click_log", "open_click_log"),
    "word_pairs": (".synthetic_clicks", "word_pairs"),
    "masked_lm": (".synthetic_text", "masked_lm"),
    "classify_text": (".synthetic_text", "classify_text"),
    "answer_span": (".synthetic_text", "answer_span"),
    "language_model": (".synthetic_text", "language_model"),
    "translate": (".synthetic_text", "translate"),
}


def open_mock(request: Request) -> Data:
    module, function = MADE_BY[request.task]
    made: Data = getattr(importlib.import_module(module, "echelon.zoo.datasets.made_up"), function)(request)
    return made


registry.add(Dataset(name="mock", open=open_mock, tasks=tuple(MADE_BY), about="made-up data for every task"))
