"""Options about hvlaunch itself (the job's name, detaching, files of options, questions), and its other commands."""

from typing import NamedTuple

from hvlaunch.cli.options import Option, OptionGroup, Value, values

__all__ = ["GENERAL", "JOB_WORDS", "JobWord"]

GENERAL = OptionGroup(
    "general",
    pages=(("Files of options", "config.md"), ("shell completion", "output.md#shell-completion")),
    options=(
        Option(
            "job_name",
            ("--job-name",),
            "the job's name, for `hvlaunch jobs` and similar commands",
            Value(("NAME",), values.printable),
            field="name",
            example="hvlaunch --job-name baseline -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "detach",
            ("--detach",),
            "leave the job running, and print its id",
            more="hvlaunch ends as soon as the workers run, and the job continues without it: `hvlaunch attach` shows its output, "
            "`hvlaunch stop` stops it. Errors before that are reported as usual. The workers' stdin is empty.",
            example="hvlaunch --detach -np 8 -H a:4,b:4 python train.py",
            # Alternatives of the same name: the stronger source decides.
            constant="at start",
            excludes="detach",
        ),
        Option(
            "detach",
            ("--detach-on-hangup",),
            "leave the job running if the terminal is closed",
            more="Without it, a job ends with its terminal. It continues as with --detach, also where the reader of a pipe is gone.",
            constant="on hangup",
            excludes="detach",
        ),
        Option(
            "dry_run",
            ("--dry-run",),
            "print what would be started, and start nothing",
            more="It prints the command, the hosts and their ranks, with `--verbose` the environment too, and connects to no host.",
            example="hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py",
            is_everyday=True,
        ),
        Option(
            "config_file",
            ("--config-file",),
            "file of options, as YAML or TOML",
            Value(("FILE",), values.not_empty, completion="file"),
            more="A file whose name ends with `.toml` is TOML, and any other is YAML; a file for horovodrun works too.",
            example="hvlaunch --config-file job.yaml python train.py",
            # A file must not name another file: the order of sources would be unclear.
            source="no file",
        ),
        Option(
            "profile",
            ("--profile",),
            "profile in the files of options to use as well",
            Value(("NAME",), values.not_empty),
            example="hvlaunch --profile gpu8 python train.py",
            source="own",
        ),
        Option(
            "isolated",
            # On the command line alone: a variable can't turn variables off.
            ("--isolated",),
            "ignore variables, and files that are not named",
            more="Then no option comes from `HVLAUNCH_` variables, `hvlaunch.toml`, `pyproject.toml` or `config.toml`.",
            source="command line",
        ),
        Option(
            "show_config",
            ("--show-config",),
            "print each option that is set, and where it is",
            more="What is printed is a file of options. With `--verbose` it has the others too, as comments.",
            example="hvlaunch --show-config -np 2 python train.py",
            source="command line",
        ),
        Option(
            "show_secrets",
            ("--show-secrets",),
            "let `--dry-run` and `--show-config` show secrets",
            more="Without it, `****` is in the place of passwords, tokens and keys, as far as names and values tell.",
            source="command line",
        ),
        Option(
            "check_build",
            ("-cb", "--check-build"),
            "print what this installation has",
            more="Add this to bug reports.",
            source="command line",
        ),
        Option(
            "print_completion",
            ("--print-completion",),
            "print a completion script for a shell",
            Value(choices=("bash", "zsh", "fish", "tcsh")),
            question="completion",
            source="command line",
        ),
        Option(
            "help", ("-h",), "print the options of every day", question="short help", source="command line"
        ),
        Option(
            "help",
            ("--help",),
            "print all help, with examples and exit codes",
            question="help",
            source="command line",
        ),
        Option(
            "version",
            ("-V", "--version"),
            "print hvlaunch's version",
            question="version",
            source="command line",
        ),
    ),
)


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
"""Words by name."""
