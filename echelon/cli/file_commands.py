"""The commands ``echelon export`` and ``echelon fetch-data``, which write and fetch files."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.base.console import say
from echelon.cli.preflight import require_path


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a directory of checkpoints: the newest is used.")],
    out: Annotated[str, typer.Argument(help="The file to write: .safetensors, or .parquet for a sparse table.")],
    *,
    table: Annotated[
        str | None, typer.Option(help="The sparse table to write, in place of the model's weights.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Write the averaged weights (engine.ema) instead.")] = False,
) -> None:
    """Write a checkpoint's weights, or one of its sparse tables, into one file."""
    require_path(checkpoint, f"no checkpoint at {checkpoint}: there is no such directory; check the path")
    if table is not None or out.endswith(".parquet"):
        from echelon.parameter_server.persistence.table_export import export_checkpoint

        count = export_checkpoint(checkpoint, out, table)
        say(f"{count:,} rows of {checkpoint} written to {out}", stdout=True)
        return
    from echelon.checkpoint import export as write
    from echelon.checkpoint import find

    found = find(checkpoint)
    count = write(found, out, ema=ema)
    say(f"{count} tensors of {found} written to {out}", stdout=True)


def fetch_data(
    spec: Annotated[str, typer.Argument(help="A .yaml or .json file that names the files, or its URL.")],
    *,
    out: Annotated[str, typer.Option(help="The folder to fetch into.")] = "data",
    part: Annotated[int, typer.Option(help="With --parts: index of the part to fetch, from 0.")] = 0,
    parts: Annotated[int, typer.Option(help="Fetch every N-th file only, from --part on.")] = 1,
    parallel: Annotated[int | None, typer.Option(help="Files at once.", show_default="the spec's, or 8")] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with a token for the server, if it needs one.")
    ] = None,
) -> None:
    """Fetch the files that a spec names, whole and verified; files that are there already are skipped."""
    require_path(spec, f"'{spec}' cannot be read: No such file or directory; check the path")
    from echelon.data import Downloader

    given = Downloader(spec, out, worker=part, workers=parts, parallel=parallel, token_env=token_env)
    say(f"{len(given.fetch())} files of {spec.split('?')[0]} are in {out}", stdout=True)
