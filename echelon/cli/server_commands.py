"""The command ``echelon serve``, which starts a parameter server by hand."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    *,
    endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of this server.")] = None,
    pservers: Annotated[
        str | None, typer.Option(help="HOST:PORT,... of all servers, the same everywhere.", show_default="this one")
    ] = None,
    trainers: Annotated[int | None, typer.Option(help="Workers of the job.", show_default="1")] = None,
    state: Annotated[str | None, typer.Option(help="Directory for state that outlives this process.")] = None,
    join_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the workers.")] = None,
    token: Annotated[
        str | None, typer.Option(help="The secret of the job. Other users see it here: better set ECHELON_PS_TOKEN.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate (PEM): speak TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="CA of the other servers' certificates (PEM).")] = None,
    client_ca: Annotated[str | None, typer.Option(help="CA that callers' certificates must have (PEM).")] = None,
    read_only: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Serve its rows to readers; take no updates.")
    ] = None,
) -> None:
    """Run a parameter server by hand; it ends when the workers are done."""
    from echelon.cli.commands.serve import serve_by_hand

    files = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca, "client_ca": client_ca}
    serve_by_hand(endpoint, pservers, trainers, state, join_timeout, token, files, read_only)
