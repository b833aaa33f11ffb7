"""Exports the model's weights as one safetensors file that other programs read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from echelon.base.errors import CheckpointError
from echelon.checkpoint import dtypes, tensorfile
from echelon.checkpoint.directory import find, sync_directory
from echelon.checkpoint.os_errors import cannot_write
from echelon.checkpoint.reader import Stored
from echelon.checkpoint.tensorfile import TensorSlot


def export(
    path_or_dir: str | os.PathLike[str], out: str | os.PathLike[str], prefix: str = "model.", *, ema: bool = False
) -> int:
    """Write the tensors whose names begin with ``prefix``, without it, to ``out``; return their number.

    ema:  write the moving average of a tensor if the checkpoint has one

    Tied weights are stored once; the file has them under each of their names, according to the fact ``aliases`` (second
    name: first name). Only one tensor at a time is in memory.
    """
    stored = Stored(find(path_or_dir))
    sources = weight_names(stored, prefix, ema=ema)
    sources |= {second: sources[first] for second, first in _aliases(stored) if first in sources}
    _write(Path(out), stored, sources)
    return len(sources)


def weight_names(stored: Stored, prefix: str, *, ema: bool) -> dict[str, str]:
    """Return the names of the tensors under a prefix, without it, each with the name of the tensor to read.

    ema:  True for the moving average of a tensor where the checkpoint has one
    """
    sources = {name.removeprefix(prefix): name for name in stored.names() if name.startswith(prefix)}
    if not sources:
        raise CheckpointError(f"{stored.path} holds no tensor under '{prefix}'; it holds {_some(stored.names())}")
    if ema:
        averages = {name.removeprefix("ema."): name for name in stored.names() if name.startswith("ema.")}
        if not averages:
            raise CheckpointError(f"{stored.path} holds no averaged weights; call engine.ema(...) in the script")
        sources |= averages
    return sources


def _aliases(stored: Stored) -> Iterable[tuple[str, str]]:
    aliases = stored.facts.get("aliases")
    pairs = aliases.items() if isinstance(aliases, dict) else ()
    return [(second, first) for second, first in pairs if isinstance(first, str)]


def _write(out: Path, stored: Stored, sources: Mapping[str, str]) -> None:
    # the order that safetensors itself uses, in which every tensor is aligned to its dtype
    names = sorted(sources, key=lambda name: (-stored.dtype(sources[name]).itemsize, name))
    slots = [_slot(stored, name, sources[name]) for name in names]
    contents = (dtypes.bytes_of(stored.read(sources[name])) for name in names)
    aside = out.with_name(f".{out.name}.writing")
    try:
        tensorfile.write(aside, slots, contents, note={"format": "pt"})
        aside.rename(out)
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(out, error)) from None
    finally:
        aside.unlink(missing_ok=True)


def _slot(stored: Stored, name: str, source: str) -> TensorSlot:
    dtype, shape = stored.dtype(source), stored.shape(source)
    return TensorSlot(name, *dtypes.exported_as(dtype, shape), dtypes.nbytes(dtype, shape))


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{len(names)} others, such as {shown}" if names else "none at all"
