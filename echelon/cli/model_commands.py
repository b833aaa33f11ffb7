"""The commands ``echelon train`` and ``echelon zoo``, for the models of the zoo."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.base.console import say
from echelon.cli.options import AsJson
from echelon.cli.parsing import EchelonCommand, EchelonGroup


def train(
    words: Annotated[list[str] | None, typer.Argument(metavar="--NAME VALUE ...")] = None,
) -> None:
    """Train a model of the zoo: echelon train --model_name lenet --dataset_name digits --procs 2."""
    from echelon.cli.commands.train import run_train

    raise typer.Exit(run_train(words or []))


zoo = typer.Typer(cls=EchelonGroup, help="The models and data sets that 'echelon train' knows.", no_args_is_help=True)


@zoo.command("list", cls=EchelonCommand)
def zoo_list(*, as_json: AsJson = False) -> None:
    """List all models and data sets, one line each."""
    from echelon.zoo.zoo_tables import list_zoo

    print(list_zoo(as_json))


@zoo.command("show", cls=EchelonCommand)
def zoo_show(
    name: Annotated[str, typer.Argument(help="A model or a data set.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show one model: parameters, arithmetic, memory, recommended strategy, its own settings. Or show one data set."""
    from echelon.zoo.registry import require_name

    require_name(name)
    from echelon.zoo.zoo_tables import show_zoo_entry

    print(show_zoo_entry(name, as_json))


@zoo.command("copy", cls=EchelonCommand)
def zoo_copy(
    name: Annotated[str, typer.Argument(help="A model.")],
    out: Annotated[str | None, typer.Argument(help="The script to write.", show_default="NAME.py")] = None,
) -> None:
    """Write a model and its training loop into a script of your own, to be changed at will."""
    from echelon.zoo.registry import require_name

    require_name(name)
    from echelon.zoo.copy_script import copy_model

    say(copy_model(name, out), stdout=True)
