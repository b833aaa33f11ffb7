"""``echelon serve``: start a parameter server from command-line options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from echelon.base.console import say
from echelon.base.environment import PADDLE_SERVERS, PS_CA, PS_CERT, PS_CLIENT_CA, PS_KEY
from echelon.base.errors import PeerLost, UsageError
from echelon.base.security import Security
from echelon.distributed.ps_role import find_role

#: The environment variable that each option sets.
VARIABLES = {"tls_cert": PS_CERT, "tls_key": PS_KEY, "tls_ca": PS_CA, "client_ca": PS_CLIENT_CA}


def serve_by_hand(
    endpoint: str | None,
    pservers: str | None,
    trainers: int | None,
    state: str | None,
    join_timeout: float | None,
    token: str | None,
    files: Mapping[str, str | None],
    read_only: str | None,
) -> NoReturn:
    """Run the server at ``endpoint`` and exit with its code; the environment gives the options that are None."""
    named = {VARIABLES[option]: file for option, file in files.items() if file is not None}
    security = Security.from_environment({**os.environ, **named}, token=token)
    listed = pservers or next((os.environ[name] for name in PADDLE_SERVERS if os.environ.get(name)), endpoint)
    if listed is None:
        raise UsageError(
            "--endpoint is missing; give --endpoint HOST:PORT, and --pservers if there are several servers"
        )
    role = find_role(
        role="server",
        pservers=listed,
        current_endpoint=endpoint,
        trainers=trainers,
        join_timeout=join_timeout,
        token=security.token,
    )
    from echelon.parameter_server.server.process import end, serve  # after all options are checked: 0.7 s
    from echelon.parameter_server.server.read_only import serve_checkpoint

    try:
        if read_only is not None:
            code = serve_checkpoint(role, Path(read_only), security)
        else:
            code = serve(role, state=None if state is None else Path(state), security=security)
    except PeerLost as error:
        say(str(error))
        code = 1
    end(code)
