"""``echelon completion``: shell completion of commands and options, without importing torch or parsing the line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from echelon.base.errors import UsageError, nearest
from echelon.cli.option_spelling import dashed
from echelon.cli.parsing import option_names, valued_options

#: Environment variable set by the shell function: ``echelon`` then only prints completions of the last argument.
COMPLETE = "_ECHELON_COMPLETE"

_BASH = f"""\
_echelon_completion() {{
    local IFS=$'\\n'
    COMPREPLY=($({COMPLETE}=1 "${{COMP_WORDS[0]}}" "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _echelon_completion echelon
"""
_ZSH = f"""\
#compdef echelon
_echelon_completion() {{
    local -a found
    found=("${{(@f)$({COMPLETE}=1 "${{words[1]}}" "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "${{found[1]}}" ]]; then compadd -a found; else _files; fi
}}
compdef _echelon_completion echelon
"""
_FISH = f"""\
complete -c echelon -a "({COMPLETE}=1 echelon (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)"
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Shell to print completions for.")],
) -> None:
    """Print the shell code that completes commands and options: source <(echelon completion bash)."""
    if shell not in SHELLS:
        raise UsageError(f"completion {shell}: unknown shell{nearest(shell, SHELLS)}")
    print(SHELLS[shell], end="")


def candidates(root: Any, words: list[str]) -> list[str]:
    """Return the completions of the last of ``words``; none where a file is expected, which the shell completes.

    root: the click command of ``echelon``
    """
    command, at = root, 0
    while at < len(words) - 1 and hasattr(command, "commands"):
        command = command.commands.get(words[at].replace("_", "-"), command) if words[at][:1] != "-" else command
        at += 1
    last = words[-1] if words else ""
    if hasattr(command, "commands") and not last.startswith("-"):
        known = [name for name, each in command.commands.items() if not each.hidden]
    elif last.startswith("-") and _is_open(root, command, words[at:-1]):
        known = sorted(_options(root, command))
    else:
        known = []
    return [name for name in known if name.startswith(dashed(last))]


def _options(root: Any, command: Any) -> set[str]:
    result = {name for name in option_names(command) | {"--help"} if name.startswith("--")}
    return result | option_names(root.commands["run"]) if command.name in ("doctor", "train") else result


def _is_open(root: Any, command: Any, words: list[str]) -> bool:
    """Return False if a script precedes: the arguments after it belong to the script."""
    if "--" in words:
        return False
    if command.context_settings.get("allow_interspersed_args", True) or command.name == "train":
        return True
    at, valued = 0, valued_options(command)
    while at < len(words) and words[at].startswith("-"):
        at += 2 if dashed(words[at]) in valued else 1
    return at >= len(words)
