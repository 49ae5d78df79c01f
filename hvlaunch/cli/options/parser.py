"""What help, completion, the manual page, docs/reference/options.md and the words for existing jobs share: argparse's parser, the words, and texts."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.settings import HELP_HINT, default_of, unknown_option
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "DESCRIPTION",
    "EXAMPLES",
    "EXIT_CODES",
    "JOB_WORDS",
    "JobWord",
    "Parser",
    "default_text",
    "make_parser",
    "sentences",
]

_USAGE = "hvlaunch [-np N] [-H HOSTS | --hostfile FILE] [options] COMMAND [ARG ...]"
DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Options come before COMMAND; everything after COMMAND is passed to it."
)


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors as BadUsage; `hint` names a command with help."""

    def __init__(self, *, hint: str = HELP_HINT, **settings: Any) -> None:
        super().__init__(**settings)
        self._hint = hint

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words: Sequence[str] = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise BadUsage, worded as for hvlaunch's own options. argparse would print its usage and exit."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        word, subject = words.partition(" ")[0], self.prog.removeprefix("hvlaunch ")
        if is_unknown and word.startswith("-"):
            line = [*self.prog.split(), *self._words]
            raise unknown_option(word, list(self._option_string_actions), line, self._hint)
        if is_unknown:
            raise BadUsage(f"{subject} takes no {word!r}", hint=self._hint)
        _, is_missing, names = message.partition("the following arguments are required: ")
        cause = f"{subject} needs {names}" if is_missing else message.removeprefix("argument ")
        raise BadUsage(cause, hint=self._hint)


def make_parser(groups: Sequence[OptionGroup], describe: Callable[[Option], str]) -> Parser:
    """Return a parser with these options, for help and completion. `describe` returns an option's help text."""
    parser = Parser(
        prog="hvlaunch", usage=_USAGE, description=DESCRIPTION, add_help=False, allow_abbrev=False
    )
    for group in groups:
        section = parser.add_argument_group(group.title, group.about.replace("`", "") or None)
        for option in group.options:
            # argparse substitutes %(name)s in help texts.
            text = describe(option).replace("%", "%%")
            section.add_argument(*option.flags, dest=option.name, help=text, **_settings(option))
    return parser


def _settings(option: Option) -> dict[str, Any]:
    """Return add_argument()'s arguments for an option, without its names."""
    value = option.value
    if value is None:
        return {"action": "store_true"}
    settings: dict[str, Any] = {"action": "append"} if option.repeats else {}
    if value.choices:
        settings["choices"] = value.choices
    if value.metavars:
        settings["metavar"] = value.metavars if len(value.metavars) > 1 else value.metavars[0]
    if len(value.metavars) > 1:
        settings["nargs"] = len(value.metavars)
    return settings


class JobWord(NamedTuple):
    """A word and its arguments."""

    name: str
    usage: str
    help: str
    """A phrase. `code` is in backquotes."""


JOB_WORDS = {
    word.name: word
    for word in (
        JobWord("presets", "[--json]", "list the programs that `--for` knows, and your own presets"),
        JobWord(
            "jobs",
            "[--all] [--json]",
            "list your jobs on this machine: those that run, and those that failed lately",
        ),
        JobWord(
            "attach",
            "[JOB] [--ranks LIST]",
            "watch the output of a job, or take over a job whose driver was killed; Ctrl-C leaves it running",
        ),
        JobWord(
            "logs",
            "[JOB] [-f] [--ranks LIST] [--since TIME] [--json]",
            "print the output of a job, as far as it is kept",
        ),
        JobWord("events", "[JOB] [-f]", "print what has happened in a job, an object on each line"),
        JobWord(
            "top",
            "[JOB] [--plain] [--json] [--web [--bind ADDRESS [--no-tls]]]",
            "show what a job's hosts and ranks do, full screen or in a browser",
        ),
        JobWord(
            "stacks",
            "[JOB] [--ranks LIST] [--native] [--json]",
            "print what the workers of a job are doing: their stacks, equal ones once",
        ),
        JobWord(
            "metrics",
            "[JOB] [--textfile FILE [--interval SECONDS]] [--scrape [--bind ADDRESS [--no-tls]]]",
            "print what your jobs do, or one of them, for Prometheus; or write or serve it",
        ),
        JobWord("signal", "SIGNAL [JOB]", "send a signal to all workers of a job"),
        JobWord(
            "move",
            "HOST [TO] [--job JOB]",
            "move the workers of a host to a spare without losing a step, and wait until the host is free",
        ),
        JobWord("stop", "[JOB] [--kill]", "stop a job as Ctrl-C does, and wait for its end"),
        JobWord(
            "wait",
            "[JOB] [--ready]",
            "wait for a job's end, or for its service; its exit code is this command's",
        ),
        JobWord(
            "pool",
            "up NAME -H HOSTS | down NAME | status [NAME]",
            "keep connections to hosts, so that jobs there start sooner",
        ),
        JobWord(
            "queue",
            "add [OPTIONS] COMMAND | ls | rm JOB | top JOB | hold JOB | release JOB",
            "queue jobs, which start as soon as their GPUs are free, also after you have logged out",
        ),
        JobWord(
            "rerun",
            "JOB [OPTIONS]",
            "start a job again: the same code, command, options and environment, except for the options here",
        ),
        JobWord("diff", "JOB JOB [--json]", "print what differs between two jobs"),
        JobWord(
            "cp",
            "[-H HOSTS | --hostfile FILE] [--json] SRC DST",
            "copy a file or a directory to all hosts, from here or from one of them (`HOST:PATH`)",
        ),
        JobWord(
            "collect",
            "[JOB [GLOB[:DIR] ...]] [--json]",
            "bring files of a job's workers back, while it runs or if its hosts can still be reached",
        ),
        JobWord("forget", "JOB", "remove what is kept of a job that has ended"),
        JobWord(
            "translate", "'LINE'", "print a line of torchrun, mpirun or another launcher as one of hvlaunch"
        ),
        JobWord(
            "mcp",
            "[--allow-actions]",
            "answer an assistant's questions about jobs and hosts, by the Model Context Protocol on stdin and stdout",
        ),
        JobWord(
            "doctor",
            "[-H HOSTS | --hostfile FILE] [--json]",
            "check this installation and the hosts; the first thing to run, and to add to a bug report",
        ),
        JobWord(
            "hosts",
            "[--clear HOSTS] [--json]",
            "show what jobs have remembered of hosts, the worst first",
        ),
        JobWord(
            "check",
            "[-H HOSTS | --hostfile FILE] [--json] [--html FILE] [--expect FILE] [--write-hostfile FILE] [--deep] [OPTIONS] [COMMAND]",
            "compare hosts before a job, and name what would stop or slow it; starts nothing",
        ),
        JobWord(
            "bisect",
            "[-H HOSTS | --hostfile FILE] [--repeat N] [--seconds S] [--json] [OPTIONS] -- COMMAND",
            "run a failing command on sets of hosts, until one host or one link explains all results",
        ),
        JobWord(
            "sbatch",
            "[-H HOSTS | --hostfile FILE] [--wait] [OPTIONS] SCRIPT [ARG ...]",
            "run a batch script of Slurm on hosts without Slurm, and print its number",
        ),
        JobWord(
            "practise",
            "[kill | cut | freeze | slow | host | all]",
            "train on pretended hosts, and cause faults to see how hvlaunch recovers",
        ),
    )
}
"""Words by name, in the order of help. `WORDS` in cli/main.py has their names too: a job's start loads nothing of this."""


EXIT_CODES = (
    ("0", "all workers ended with 0"),
    ("1-125", "the first failing worker's own"),
    ("126, 127", "its command can't be executed; was not found"),
    ("128+n", "signal n ended it; 130, 143: Ctrl-C, SIGTERM ended the job"),
    ("2", "bad usage"),
    ("69", "a host can't be used, or was lost"),
    ("70", "a defect of hvlaunch"),
    ("74", "an answer could not be printed"),
    ("75", "too few workers for an elastic job"),
)
EXAMPLES = (
    ("two workers on this machine", "hvlaunch -np 2 python train.py"),
    ("eight workers on two hosts", "hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py --epochs 3"),
    (
        "one worker for each GPU of sixteen hosts, as user ml",
        "hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py",
    ),
    (
        "hosts from a file, secrets from another, NCCL's log on",
        "hvlaunch --hostfile hosts --env-file keys -x NCCL_DEBUG=INFO \\\n    python train.py",
    ),
    (
        "two to eight workers on hosts that come and go",
        "hvlaunch -np 4 --min-np 2 --max-np 8 \\\n    --host-discovery-script ./discover.sh python train.py",
    ),
    ("what would be started where", "hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py"),
)
"""Titles and command lines."""


def default_text(option: Option) -> str:
    """Return an option's default in words: `60 s`; empty if it has none."""
    if option.default or option.value is None:
        return option.default
    value = default_of(option)
    if value in (None, (), []):
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if not option.value.choices and isinstance(value, str):
        text = f"'{text}'"
    return f"{text} {option.value.unit}".rstrip()


def sentences(option: Option) -> str:
    """Return the full help of an option, without its default."""
    repeated = "May be repeated." if option.repeats else ""
    return " ".join(text for text in (f"{option.help}.", option.more, repeated) if text)
