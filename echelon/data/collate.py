"""``BatchCollator``: collates samples into a batch, and names the sample that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch.utils.data import default_collate

from echelon.base.errors import DataError, one_line
from echelon.data.hugging_face import column_collate, has_columns
from echelon.data.loader_options import LoaderOptions
from echelon.data.padding import pad_collate
from echelon.data.seeding import seed_all


class BatchCollator:
    """The user's collate function, seeded; or Echelon's or torch's own, with errors that name the sample."""

    #: called with the samples of a batch before they are collated, unless torch's default collates them
    overheard: ClassVar[Callable[[list[Any]], None] | None] = None

    def __init__(self, options: LoaderOptions, dataset: Any = None) -> None:
        self.is_ours = options.collate is None or options.collate is default_collate
        self._into_batch = options.collate or _ours(options, dataset)

    def __call__(self, samples: list[Any], names: Sequence[int], seed: int) -> Any:
        if BatchCollator.overheard is not None and self._into_batch is not default_collate:
            BatchCollator.overheard(samples)
        if not self.is_ours:
            seed_all(seed)  # random masking happens here, and must be the same after a resume
            return self._into_batch(samples)
        try:
            return self._into_batch(samples)
        except Exception as error:
            raise DataError(self._blame(samples, names, error)) from None

    def _blame(self, samples: list[Any], names: Sequence[int], error: Exception) -> str:
        for sample, name in zip(samples, names, strict=True):
            if reason := self._reason([sample]):
                return f"sample {name} cannot become part of a batch: {reason}; convert it, or pass collate="
            if reason := self._reason([samples[0], sample]):
                return (
                    f"sample {name} does not fit into one batch with sample {names[0]}: {reason}; "
                    "make their shapes alike, pass lengths= to pad sequences, or pass collate="
                )
        return f"samples {list(names)[:4]}... cannot become one batch: {one_line(error)}; pass collate="

    def _reason(self, samples: list[Any]) -> str:
        try:
            self._into_batch(samples)
        except Exception as error:
            return one_line(error)
        return ""


def _ours(options: LoaderOptions, dataset: Any) -> Callable[[list[Any]], Any]:
    if options.pack:
        from echelon.data.packing import pack_collate  # with echelon.nn, which most loaders do not need
        from echelon.nn.packed import MULTIPLE

        multiple = MULTIPLE if options.pack is True else options.pack
        return partial(pack_collate, multiple=multiple, pad_value=options.pad_value)
    if options.lengths is not None:
        return partial(pad_collate, pad_value=options.pad_value)
    return column_collate if has_columns(dataset) else default_collate
