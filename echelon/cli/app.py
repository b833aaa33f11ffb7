"""The list of commands, in the order in which they are shown."""

from __future__ import annotations

import typer

from echelon.cli.files import export, fetch_data
from echelon.cli.models import train, zoo
from echelon.cli.plans import bench, explain, memory, plan
from echelon.cli.run import run
from echelon.cli.runs import report, timeline, watch
from echelon.cli.servers import serve
from echelon.cli.submit import submit
from echelon.cli.trust import doctor, verify
from echelon.timeline.word import TimelineWord

app = typer.Typer(
    help="Train one PyTorch model on many devices, with the numbers one process gives.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

#: Words after the script, and words that another room reads, are not the command's own.
_SCRIPT_IS_LAST = {"allow_interspersed_args": False}
_READ_ELSEWHERE = {"ignore_unknown_options": True}

app.command(cls=TimelineWord, context_settings=_SCRIPT_IS_LAST)(run)
app.command(add_help_option=False, context_settings=_READ_ELSEWHERE | _SCRIPT_IS_LAST)(train)
app.add_typer(zoo, name="zoo")
app.add_typer(submit, name="submit")
app.command()(serve)
app.command()(export)
app.command()(explain)
app.command()(plan)
app.command()(memory)
app.command()(bench)
app.command(context_settings=_READ_ELSEWHERE | {"allow_extra_args": True})(doctor)
app.command(context_settings={"allow_interspersed_args": True})(verify)
app.command()(timeline)
app.command()(report)
app.command()(watch)
app.command(name="fetch-data")(fetch_data)
