"""Tests on models and data sets of other libraries: transformers, peft, datasets, timm."""

from __future__ import annotations

import warnings

# Libraries warn on import of things that are not theirs to decide here; the suite turns warnings into errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import transformers

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
assert peft.__version__
