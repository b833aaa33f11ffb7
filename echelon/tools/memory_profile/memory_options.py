"""``MemoryOptions``: the options of ``echelon memory``, as the user gives them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from echelon.base.option_checks import at_least, require_one_of

Inputs = Annotated[
    str | None,
    typer.Option("--input", help="One sample, for a model without a batch: 3x224x224, int64:128:30522."),
]


@dataclass(frozen=True)
class MemoryOptions:
    """The options that decide the prediction, in the order of the help. None: the script's setting, or the default.

    The command line has one for each field; the child process of a script receives them as JSON.
    """

    model: Annotated[
        str, typer.Argument(help="A script, zoo:NAME, gpt:layers=...,..., or file.py:callable, as for 'echelon plan'.")
    ]
    procs: Annotated[
        int | None, typer.Option(help="Processes of the job.", show_default="the fewest that the options need")
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Samples in a batch of each copy of the model.",
            show_default="the model's",
        ),
    ] = None
    plan: Annotated[str | None, typer.Option(help="A plan from 'echelon plan --save'; it sets all the rest.")] = None
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of a pipeline; cut by cost.")] = None
    split: Annotated[int | None, typer.Option(min=1, help="Processes that share each layer that plans can split.")] = (
        None
    )
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a batch.", show_default="4 with stages")
    ] = None
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, gpipe, interleaved or zero-bubble.", show_default="1f1b")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: device whose kernels count.", show_default="the one here")
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, sgd, momentum, lamb ...", show_default="the script's, or adamw")
    ] = None
    amp: Annotated[
        str | None, typer.Option(help="bf16, fp16 or off.", show_default="the script's; else bf16 on GPUs")
    ] = None
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="Keep few activations.", show_default="the script's, or no"),
    ] = None
    low_memory: Annotated[
        bool | None,
        typer.Option("--low-memory/--no-low-memory", help="Six bytes a parameter.", show_default="the script's, or no"),
    ] = None
    shard: Annotated[
        int | None, typer.Option(help="0 to 3: level of sharding (ZeRO).", show_default="the script's, or 0")
    ] = None
    merge: Annotated[
        int | None,
        typer.Option(
            "--gradient-merge", min=1, help="Batches that make up one update.", show_default="the script's, or 1"
        ),
    ] = None
    input: Inputs = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--procs", self.procs),
            ("--batch-size", self.batch),
            ("--stages", self.stages),
            ("--split", self.split),
            ("--micro-batches", self.micro_batches),
            ("--gradient-merge", self.merge),
        ):
            at_least(1, option, value)
        require_one_of("--device", self.device, ("cpu", "cuda"))
        require_one_of("--amp", self.amp, ("bf16", "fp16", "off"))
        require_one_of("--shard", self.shard, (0, 1, 2, 3))
        if self.schedule is not None:
            from echelon.strategy.annotations.marks import ScheduleName

            require_one_of("--schedule", self.schedule, get_args(ScheduleName))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
