"""Shell completion: --print-completion."""

import argparse
from collections.abc import Sequence
from typing import Any

import shtab

from hvlaunch.cli.job_words import JOB_WORDS
from hvlaunch.cli.options.option import Group
from hvlaunch.cli.options.parser import make_parser
from hvlaunch.cli.pages.fish_completion import fish_completion
from hvlaunch.cli.pages.job_completion import BASH, ZSH, with_job_words

__all__ = ["completion"]

_WAYS: dict[str, dict[str, str]] = {
    "hosts": {"bash": "_hvlaunch_hosts", "zsh": "_hosts", "tcsh": ""},
    "variables": {"bash": "_hvlaunch_variables", "zsh": "_parameters -g '*export*'", "tcsh": "e"},
    "command": {"bash": "_hvlaunch_command_or_files", "zsh": "_normal", "tcsh": "c"},
}
"""What is offered, beyond shtab's own files and directories."""

_WORDS = " ".join(JOB_WORDS)
_BASH = f"""\
_hvlaunch_hosts() {{
  compgen -A hostname -- "$1"
}}
_hvlaunch_variables() {{
  compgen -e -- "$1"
}}
_hvlaunch_command_or_files() {{
  [ "$COMP_CWORD" != 1 ] || compgen -W "{_WORDS}" -- "$1"
  compgen -c -- "$1"
  compgen -f -- "$1"
}}
{BASH}"""
_PREAMBLES = {"bash": _BASH, "zsh": ZSH}


def completion(groups: Sequence[Group], shell: str) -> str:
    """A script that completes hvlaunch's flags, their values, and the user's command, in bash, zsh, fish or tcsh."""
    if shell == "fish":
        return fish_completion(groups)
    ways: dict[str, Any] = {**_WAYS, "file": shtab.FILE, "directory": shtab.DIRECTORY}
    parser = make_parser(groups, lambda option: option.help.replace("`", ""))
    values = {option.name: option.value for group in groups for option in group.options}
    for action in parser._actions:  # noqa: SLF001 (argparse has no other way to them, and shtab no other way in)
        value = values[action.dest]
        if value is not None and value.completion:
            action.complete = ways[value.completion]  # type: ignore[attr-defined]
    command = parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    command.complete = ways["command"]  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell, preamble=_PREAMBLES.get(shell, ""))
    script = with_job_words(script) if shell in _PREAMBLES else script
    return script.replace("'p/*/()/'", "'p/*/f/'") + "\n"  # tcsh: files, for the command's own arguments
