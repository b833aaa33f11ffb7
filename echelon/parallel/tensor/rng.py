"""Random numbers inside split layers.

Ranks that share a batch must draw the same numbers outside split layers, or their activations would differ. Inside,
each rank holds another part of one tensor, and with the same numbers the dropout mask would repeat from rank to rank.
So a draw inside forks the generator: one number is drawn from the common generator, which therefore advances equally on
all ranks, and this number plus the rank seeds the rank's own generator for the duration of the draw.

The number comes from the CPU generator even for a GPU: reading it does not wait for the device, and recomputed forward
passes find that generator in its earlier state. With one rank nothing is forked: the numbers are those of the unsplit
module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from echelon.parallel.tensor.split_axis import SplitAxis


@contextlib.contextmanager
def rank_local_rng(axis: SplitAxis, device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Draw random numbers on ``device`` from this rank's own generator inside the context.

    wanted:  False leaves the generator unchanged; it must be equal on all ranks
    """
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
