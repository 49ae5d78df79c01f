"""Shell completion: --print-completion."""

import argparse

__all__ = ["completion"]

_FILES = {"hostfile", "env_file", "events", "ssh_config", "ssh_identity_file", "remote_python"}
_DIRECTORIES = {"cwd", "output_filename"}

_OWN: dict[str, dict[str, str | dict[str, str]]] = {
    "hosts": {"bash": "_hvlaunch_hosts", "zsh": "_hosts", "tcsh": ""},
    "x": {"bash": "_hvlaunch_variables", "zsh": "_parameters -g '*export*'", "tcsh": "e"},
    "command": {"bash": "_hvlaunch_command_or_files", "zsh": "_normal", "tcsh": "c"},
}

_BASH = """\
_hvlaunch_hosts() {
  compgen -A hostname -- "$1"
}
_hvlaunch_variables() {
  compgen -e -- "$1"
}
_hvlaunch_command_or_files() {
  compgen -c -- "$1"
  compgen -f -- "$1"
}
"""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script that completes hvlaunch's flags, their values, and the user's command, in bash, zsh or tcsh."""
    import shtab  # noqa: PLC0415 (no job needs it)

    known = dict.fromkeys(_FILES, shtab.FILE) | dict.fromkeys(_DIRECTORIES, shtab.DIRECTORY)
    known |= _OWN
    for action in parser._actions:  # noqa: SLF001 (argparse has no other way to them, and shtab no other way in)
        if action.dest in known:
            action.complete = known[action.dest]  # type: ignore[attr-defined]
    command = parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    command.complete = _OWN["command"]  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell, preamble=_BASH if shell == "bash" else "")
    return script.replace("'p/*/()/'", "'p/*/f/'") + "\n"  # tcsh: files, for the command's own arguments
