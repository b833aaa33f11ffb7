"""Tests on models and data sets of other libraries: transformers, peft, datasets, timm."""

from __future__ import annotations

import warnings
from multiprocessing import forkserver

import harness

# Libraries warn on import of things that are not theirs to decide here; the suite turns warnings into errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import transformers

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
assert peft.__version__

# Ranks are forked with these imported, instead of importing them each time: 3 s each.
_IMPORTED = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
harness.context.set_forkserver_preload([*_IMPORTED, "transformers.modeling_utils", "transformers.generation", "peft"])
