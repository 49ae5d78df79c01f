"""Shell completion for --print-completion: of options, their values, the user's command, and the ids and names of jobs."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import shtab

from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import JOB_WORDS, JobWord, make_parser

__all__ = ["BASH", "ZSH", "after", "completion", "fish_completion", "with_job_words"]

_WORDS = " ".join(JOB_WORDS)
_SIGNALS = "HUP INT TERM KILL USR1 USR2 STOP CONT"
# sed reads the jobs' files: a key was pressed, and starting Python or asking drivers would take too long.
_LIST = (
    r"""sed -nE 's/^\{"id": "([0-9a-f]+)", "name": ("([A-Za-z0-9._-]+)"|[^,]*),.*/\1 \3/p' """
    r""""${XDG_STATE_HOME:-$HOME/.local/state}"/hvlaunch/jobs/*/about.json 2>/dev/null"""
)


def after(word: JobWord) -> str:
    """Return a command for any shell that prints words to follow the job word."""
    # Words in lower case are typed as they are; NAME and HOSTS are the user's.
    flags = " ".join(re.findall(r"(?<![\w-])(?:--[a-z-]+|-[a-zA-Z]|[a-z]+)(?![\w-])", word.usage))
    signals = f"{_SIGNALS} " if "SIGNAL" in word.usage else ""
    echo = f"echo {signals}{flags} --help"
    return f"sh -c {shlex.quote(f'{echo}; {_LIST}')}" if "JOB" in word.usage else echo


_CASES = "".join(f"    {name}) {after(word)} ;;\n" for name, word in JOB_WORDS.items())
_AFTER = f"_hvlaunch_after() {{\n  case $1 in\n{_CASES}  esac\n}}\n"
BASH = f"""\
{_AFTER}_hvlaunch_job_word() {{
  [ "$COMP_CWORD" -gt 1 ] || return 1
  case " {_WORDS} " in *" ${{COMP_WORDS[1]}} "*) ;; *) return 1 ;; esac
  COMPREPLY=($(compgen -W "$(_hvlaunch_after "${{COMP_WORDS[1]}}")" -- "${{COMP_WORDS[COMP_CWORD]}}")) || return 0
}}
"""
ZSH = f"""\
{_AFTER}_hvlaunch_job_word() {{
  (( CURRENT > 2 )) || {{ compadd -- {_WORDS}; return 1 }}
  [[ " {_WORDS} " == *" $words[2] "* ]] || return 1
  compadd -- ${{=$(_hvlaunch_after $words[2])}}
  return 0
}}
"""


def with_job_words(script: str) -> str:
    """Shtab's script for bash or zsh, which asks these functions first."""
    head = "\n_shtab_hvlaunch() {\n"
    # shtab's own functions take job words for the user's command.
    return script.replace(head, f"{head}  _hvlaunch_job_word && return\n", 1)


_SCRIPT = r"""# fish completion for hvlaunch: its options, their values, and what the command's own completion offers.

# The words of the command; nothing as long as options are typed.
function __hvlaunch_command
    set -l values 0
    set -l words (commandline -opc) (commandline -ct)
    for index in (seq 2 (count $words))
        set -l word $words[$index]
        if test $values -gt 0
            set values (math $values - 1)
        else if test "$word" = --
            string join \n -- $words[(math $index + 1)..]
            return
        else if not string match -q -- '-*' "$word"
            string join \n -- $words[$index..]
            return
        else if contains -- "$word" PAIRS
            set values 2
        else if contains -- "$word" VALUES
            set values 1
        end
    end
end

function __hvlaunch_in_options
    test (count (__hvlaunch_command)) -le 1
end

function __hvlaunch_complete_command
    set -l words (__hvlaunch_command)
    complete -C (string join ' ' -- (string escape -- $words[..-2]) $words[-1])
end

complete -c hvlaunch -f
# Whether the first word is about a job, and is complete.
function __hvlaunch_has_job_word
    set -l words (commandline -opc)
    test (count $words) -gt 1; and contains -- $words[2] WORDS
end

function __hvlaunch_after_job_word
    switch (commandline -opc)[2]
AFTER    end
end

complete -c hvlaunch -n __hvlaunch_has_job_word -x -a '(__hvlaunch_after_job_word | string split -n " ")'
complete -c hvlaunch -n 'not __hvlaunch_has_job_word; and test (count (__hvlaunch_command)) -gt 0' -x -a '(__hvlaunch_complete_command)'
"""

_FISH_WAYS = {
    "file": "-r -F",
    "directory": "-x -a '(__fish_complete_directories)'",
    "hosts": "-x -a '(__fish_print_hostnames)'",
    "variables": "-x -a '(set -xn)'",
    "": "-x",
}


# Not shtab's: names such as `-np` and the completion of the user's command need fish's own functions.
def fish_completion(groups: Sequence[OptionGroup]) -> str:
    """The script."""
    options = [option for group in groups for option in group.options]
    words = "".join(
        f"complete -c hvlaunch -n __fish_is_first_token -a {word.name} -d {_quoted(word.help)}\n"
        for word in JOB_WORDS.values()
    )
    cases = "".join(f"        case {name}\n            {after(word)}\n" for name, word in JOB_WORDS.items())
    script = _SCRIPT.replace("AFTER", cases).replace("WORDS", " ".join(JOB_WORDS))
    script = script.replace("PAIRS", _names(options, 2)).replace("VALUES", _names(options, 1))
    return script + words + "".join(f"{line}\n" for option in options for line in _lines(option))


def _names(options: Sequence[Option], count: int) -> str:
    """Return names of options with so many values."""
    return " ".join(
        name
        for option in options
        if option.value is not None and (len(option.value.metavars) or 1) == count
        for name in (*option.flags, *option.aliases)
    )


def _lines(option: Option) -> Iterator[str]:
    names = " ".join(map(_named, option.flags))
    yield f"complete -c hvlaunch -n __hvlaunch_in_options {names}{_taken(option)} -d {_quoted(option.help)}"


def _quoted(text: str) -> str:
    """A word of fish."""
    escaped = text.replace("`", "").replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _named(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    return f"-s {flag[1:]}" if len(flag) == len("-x") else f"-o {flag[1:]}"


def _taken(option: Option) -> str:
    if option.value is None:
        return ""
    if option.value.choices:
        return f" -x -a '{' '.join(option.value.choices)}'"
    return f" {_FISH_WAYS[option.value.completion]}"


_WAYS: dict[str, dict[str, str]] = {
    "hosts": {"bash": "_hvlaunch_hosts", "zsh": "_hosts", "tcsh": ""},
    "variables": {"bash": "_hvlaunch_variables", "zsh": "_parameters -g '*export*'", "tcsh": "e"},
    "command": {"bash": "_hvlaunch_command_or_files", "zsh": "_normal", "tcsh": "c"},
}
"""Completions beyond shtab's files and directories, by shell."""

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


def completion(groups: Sequence[OptionGroup], shell: str) -> str:
    """Return a script for bash, zsh, fish or tcsh that completes options, their values, and the user's command."""
    if shell == "fish":
        return fish_completion(groups)
    ways: dict[str, Any] = {**_WAYS, "file": shtab.FILE, "directory": shtab.DIRECTORY}
    parser = make_parser(groups, lambda option: option.help.replace("`", ""))
    values = {option.name: option.value for group in groups for option in group.options}
    # argparse offers no other access to its actions, and shtab no other way to set a completion.
    for action in parser._actions:  # noqa: SLF001 (see above)
        value = values[action.dest]
        if value is not None and value.completion:
            action.complete = ways[value.completion]  # type: ignore[attr-defined]
    command = parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    command.complete = ways["command"]  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell, preamble=_PREAMBLES.get(shell, ""))
    script = with_job_words(script) if shell in _PREAMBLES else script
    # shtab's tcsh script completes no files for the arguments of the user's command.
    return script.replace("'p/*/()/'", "'p/*/f/'") + "\n"
