"""The program of a server under ``echelon run``, run by rank_main.py, which records an error that it raises."""

from __future__ import annotations

import logging

from echelon.distributed.ps_role import find_role
from echelon.parameter_server.server.process import end, serve

if __name__ == "__main__":
    logging.basicConfig(format="echelon: %(message)s")
    end(serve(find_role()))
