"""Models of the Hugging Face hub: read from their files by region, written back as files that others read.

``transformers`` is imported when one of these functions is called, and not before.
"""

from typing import TYPE_CHECKING

from echelon.base.late_import import late_import

if TYPE_CHECKING:
    from echelon.hf.pretrained_model import from_pretrained

__all__ = ["from_pretrained"]

__getattr__ = late_import(__name__, {"from_pretrained": "echelon.hf.pretrained_model"})
