"""The flags for what the user sees of the workers' output."""

from argparse import ArgumentParser

from hvlaunch.cli import values
from hvlaunch.cli.options import Options
from hvlaunch.console.prefix import ASCTIME, Prefix
from hvlaunch.job import ConsoleOptions

__all__ = ["add_output", "console_options"]


def add_output(parser: ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-filename",
        metavar="DIR",
        type=values.some,
        help="write each worker's output to DIR/rank.N/stdout and stderr, beside showing it here",
    )
    output.add_argument(
        "--prefix",
        metavar="TEMPLATE",
        default=ConsoleOptions().prefix,
        help="before each line here; fields are {rank}, {host}, {local_rank}, {time} and {stream}, with formats such as "
        "{rank:03} or {time:%%H:%%M:%%S}; default: '%(default)s'",
    )
    output.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="put the time before the prefix",
    )
    output.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="prefixes in a colour for each rank: on a terminal, unless NO_COLOR is set (auto, the default), always "
        "or never",
    )
    output.add_argument(
        "--ranks",
        metavar="LIST",
        type=values.ranks,
        help="show only the output of these ranks, such as 0,8-15; files and the failure report have all",
    )
    output.add_argument(
        "--merge",
        action="store_true",
        help="print a line that several ranks write at about the same time once, with the set of ranks",
    )
    output.add_argument(
        "--events", metavar="FILE", type=values.some, help="append a JSON object for each event of the job"
    )
    loudness = output.add_mutually_exclusive_group()
    loudness.add_argument(
        "--quiet",
        action="store_true",
        help="print only what workers write, errors and the failure report",
    )
    loudness.add_argument(
        "--verbose", action="store_true", help="tell what hvlaunch does, and show its own tracebacks"
    )


def console_options(options: Options) -> ConsoleOptions:
    """Raises BadUsage where the prefix is none."""
    Prefix(options.prefix)  # what is wrong with it is said now
    return ConsoleOptions(
        prefix=ASCTIME + options.prefix if options.prefix_timestamp else options.prefix,
        color=options.color,
        ranks=options.ranks,
        merge=options.merge,
        quiet=options.quiet,
    )
