"""The commands ``echelon export``, ``echelon fetch-data`` and ``echelon tokenize``, which write and fetch files."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.cli.preflight import require_path


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a directory of checkpoints: the newest is used.")],
    out: Annotated[str, typer.Argument(help="The file to write: .safetensors, or .parquet for a sparse table.")],
    *,
    table: Annotated[
        str | None, typer.Option(help="The sparse table to write, in place of the model's weights.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Write the averaged weights (engine.ema) instead.")] = False,
    layout: Annotated[
        str,
        typer.Option("--format", help="file, or hf: a directory that AutoModel.from_pretrained loads, at OUT."),
    ] = "file",
    config: Annotated[
        str | None, typer.Option(help="With --format hf: directory of the model that the training began from.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="With --format hf: largest size of a weight file.")] = "5 GB",
    dtype: Annotated[
        str | None, typer.Option(help="With --format hf: dtype to write weights in.", show_default="their own")
    ] = None,
    servable: Annotated[
        bool, typer.Option("--servable", help="Write the directory OUT that echelon.load_servable answers from.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:CALLABLE",
            help="With --servable: returns (model, (inputs, ...)); the model becomes programs of torch.export.",
            show_default="weights only",
        ),
    ] = None,
    rows: Annotated[
        str,
        typer.Option(help="With --servable: safetensors, parquet, or HOST:PORT,... of servers that run read-only."),
    ] = "safetensors",
) -> None:
    """Write a checkpoint's weights, a sparse table, or both for serving; or the directory of a model."""
    require_path(checkpoint, f"no checkpoint at {checkpoint}: there is no such directory; check the path")
    if servable:
        from echelon.cli.commands.export_servable import export_for_serving

        export_for_serving(checkpoint, out, model, rows, ema)
        return
    if model is not None:
        raise UsageError("--model goes with --servable; add it, or leave --model out")
    if layout not in ("file", "hf"):
        raise UsageError(f"--format {layout}: expected file or hf")
    if layout == "hf":
        _export_directory(checkpoint, out, config, ema, max_shard_size, dtype)
        return
    if config is not None or dtype is not None:
        raise UsageError("--config and --dtype go with --format hf; add it, or leave them out")
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


def _export_directory(
    checkpoint: str, out: str, config: str | None, ema: bool, max_shard_size: str, dtype: str | None
) -> None:
    from echelon.hf.export_checkpoint import export_model_directory
    from echelon.hf.save_pretrained import FileOptions

    found, count = export_model_directory(checkpoint, out, config, ema, FileOptions(max_shard_size, dtype))
    say(f"{count} tensors of {found} written to the directory {out}", stdout=True)


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


def tokenize(
    corpus: Annotated[
        list[str], typer.Argument(help="Text files (.txt, .jsonl, both also with .gz), or directories of them.")
    ],
    *,
    tokenizer: Annotated[
        str, typer.Option(help="A tokenizer.json, or a directory of transformers with the tokenizer's files.")
    ],
    out: Annotated[str, typer.Option(help="The directory to write; it must not exist yet.")],
    documents: Annotated[
        str, typer.Option(help="A document of a .txt file: file, blank (texts between blank lines) or line.")
    ] = "file",
    field: Annotated[str, typer.Option(help="The field of a .jsonl line that holds the text.")] = "text",
    end: Annotated[
        str | None,
        typer.Option(help="The token after each document; '' for none.", show_default="the tokenizer's own"),
    ] = None,
    procs: Annotated[int | None, typer.Option(help="Processes.", show_default="one for each core")] = None,
) -> None:
    """Tokenize a corpus into files that training maps into memory; the same command resumes an interrupted one."""
    for path in corpus:
        require_path(path, f"no file at {path}; check the path")
    require_path(tokenizer, f"--tokenizer {tokenizer}: there is no such file or directory; give a tokenizer.json")
    if documents not in ("file", "blank", "line"):
        raise UsageError(f"--documents {documents}: expected file, blank or line")
    from echelon.data.tokens import TokenizeOptions, tokenize_corpus

    options = TokenizeOptions(documents=documents, field=field, end=end, procs=procs)  # type: ignore[arg-type]
    head = tokenize_corpus(corpus, tokenizer, out, options, say)
    say(f"{head.tokens:,} tokens of {head.documents:,} documents written to {out}", stdout=True)
