"""What a server runs under ``echelon run``, inside worker.py: an error it raises becomes the record of its end."""

from __future__ import annotations

import logging

from echelon.distributed.ps_role import find_role
from echelon.parameter_server.server.process import end, serve

if __name__ == "__main__":
    logging.basicConfig(format="echelon: %(message)s")
    end(serve(find_role()))
