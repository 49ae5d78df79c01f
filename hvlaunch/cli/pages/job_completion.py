"""Completion of what follows a job word: its options, and the ids and names of this user's jobs."""

import re
import shlex

from hvlaunch.cli.job_words import JOB_WORDS, JobWord

__all__ = ["BASH", "ZSH", "after", "with_job_words"]

_WORDS = " ".join(JOB_WORDS)
_SIGNALS = "HUP INT TERM KILL USR1 USR2 STOP CONT"
_LIST = (
    r"""sed -nE 's/^\{"id": "([0-9a-f]+)", "name": ("([A-Za-z0-9._-]+)"|[^,]*),.*/\1 \3/p' """
    r""""${XDG_STATE_HOME:-$HOME/.local/state}"/hvlaunch/jobs/*/about.json 2>/dev/null"""
)
"""Neither asks a driver nor starts Python: a key was pressed."""


def after(word: JobWord) -> str:
    """A command of any shell that prints what may follow the word."""
    flags = " ".join(re.findall(r"(?<![\w-])--?[a-z]+", word.usage))
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
    return script.replace(head, f"{head}  _hvlaunch_job_word && return\n", 1)
