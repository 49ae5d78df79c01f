"""Completion for fish, which knows names such as `-np` with one dash, and what a command's own completion offers."""

from collections.abc import Iterator, Sequence

from hvlaunch.cli.job_words import JOB_WORDS
from hvlaunch.cli.options.option import Group, Option
from hvlaunch.cli.pages.job_completion import after

__all__ = ["fish_completion"]

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

_WAYS = {
    "file": "-r -F",
    "directory": "-x -a '(__fish_complete_directories)'",
    "hosts": "-x -a '(__fish_print_hostnames)'",
    "variables": "-x -a '(set -xn)'",
    "": "-x",
}


def fish_completion(groups: Sequence[Group]) -> str:
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
    """All names of the options that take so many values."""
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
    return f" {_WAYS[option.value.completion]}"
