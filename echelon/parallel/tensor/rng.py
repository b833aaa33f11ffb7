"""Random numbers inside split layers.

Ranks that share a batch must draw the same numbers outside split layers, or their activations would part; inside, each
holds another piece of one tensor, and with the same numbers its dropout mask would repeat from rank to rank. So a draw
inside forks the stream: one number is taken from the common stream (which thereby moves on alike everywhere, however
much each rank needs), and seeds, with the rank added, a stream of the rank's own for the duration.

The number comes from the CPU's generator also for a GPU: reading it does not wait for the device, and recomputed
forward passes find that generator as it was. On one rank nothing is forked: the numbers are those of the whole module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from echelon.parallel.tensor.split_axis import SplitAxis


@contextlib.contextmanager
def rank_local_rng(axis: SplitAxis, device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Within, random numbers on ``device`` are this rank's own; ``wanted`` must be equal on all ranks."""
    if axis.size == 1 or not wanted:
        yield
        return
    seed = int(torch.randint(2**62, ())) + axis.rank
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
