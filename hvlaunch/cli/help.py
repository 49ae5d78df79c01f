"""The help: the options of every day for -h, all that there is to say for --help."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text
from rich_argparse import RichHelpFormatter

from hvlaunch.cli.given import default_of
from hvlaunch.cli.option import Group, Option
from hvlaunch.cli.parser import make_parser

__all__ = ["default_text", "help_text", "sentences"]

_SHORT_EPILOG = """\
more:
  hvlaunch --help               all {count} options, with examples and exit codes
  man hvlaunch                  the same, as a manual page
"""
_EPILOG = """\
exit codes:
  0         all workers ended with 0
  1-125     the first failing worker's own
  126, 127  its command can't be executed; was not found
  128+n     signal n ended it; 130, 143: Ctrl-C, SIGTERM ended the job
  2         bad usage
  69        a host can't be used, or was lost
  70        a defect of hvlaunch
  74        an answer could not be printed
  75        too few workers for an elastic job

examples:
  two workers on this machine
    hvlaunch -np 2 python train.py

  eight workers on two hosts
    hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py --epochs 3

  one worker for each GPU of sixteen hosts, as user ml
    hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py

  hosts from a file, secrets from another, NCCL's log on
    hvlaunch -hostfile hosts --env-file keys -x NCCL_DEBUG=INFO \\
        python train.py

  two to eight workers on hosts that come and go
    hvlaunch -np 4 --min-np 2 --max-np 8 \\
        --host-discovery-script ./discover.sh python train.py

  what would be started where
    hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py
"""


class _Formatter(RichHelpFormatter):
    help_markup = text_markup = False
    group_name_formatter = str


def help_text(groups: Sequence[Group], *, is_long: bool) -> str:
    """The help for these options, as wide as the terminal."""
    if is_long:
        return _help(groups, _long, _EPILOG, column=24)
    options = [option for group in groups for option in group.options]
    everyday = tuple(option for option in options if option.is_everyday)
    epilog = _SHORT_EPILOG.format(count=len(options))
    return _help([Group("options of every day", everyday)], _short, epilog, column=32)


def _help(groups: Sequence[Group], describe: Callable[[Option], str], epilog: str, *, column: int) -> str:
    parser = make_parser(groups, describe)
    parser.formatter_class = partial(_Formatter, max_help_position=column)
    parser.epilog = Text(epilog)  # type: ignore[assignment]  # printed as it stands
    return parser.format_help()


def default_text(option: Option) -> str:
    """What holds where the option is not given: `60 s`; empty where it is nothing."""
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
    """All that there is to say of it, but for its default."""
    repeated = "May be repeated." if option.repeats else ""
    return " ".join(text for text in (f"{option.help}.", option.more, repeated) if text)


def _short(option: Option) -> str:
    return _plain(option.help)


def _long(option: Option) -> str:
    text = sentences(option)
    default = default_text(option)
    return _plain((text if ". " in text else option.help) + (f" [default: {default}]" if default else ""))


def _plain(text: str) -> str:
    return text.replace("`", "")
