"""Options about hvlaunch itself: the job's name, detaching, files of options, questions."""

from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import Group, Option, Value

__all__ = ["GENERAL"]

GENERAL = Group(
    "general",
    pages=(("Files of options", "config.md"), ("shell completion", "output.md#shell-completion")),
    options=(
        Option(
            "job_name",
            ("--job-name",),
            "the job's name, for `hvlaunch jobs` and its like",
            Value(("NAME",)),
            field="name",
            example="hvlaunch --job-name baseline -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "detach",
            ("--detach",),
            "leave the job running, and print its id",
            more="hvlaunch ends as soon as the workers run, and the job goes on without it: `hvlaunch attach` shows its output, "
            "`hvlaunch stop` stops it. Errors before that are reported as usual. The workers' stdin is empty.",
            example="hvlaunch --detach -np 8 -H a:4,b:4 python train.py",
            constant="at start",
            excludes="detach",
        ),
        Option(
            "detach",
            ("--detach-on-hangup",),
            "leave the job running if the terminal is closed",
            more="Without it, a job ends with its terminal. It goes on as with --detach, also where the reader of a pipe is gone.",
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
            more="A file whose name ends with `.toml` is TOML, and any other is YAML; one of horovodrun will do.",
            example="hvlaunch --config-file job.yaml python train.py",
            source="no file",
        ),
        Option(
            "profile",
            ("--profile",),
            "part of the files of options to use too",
            Value(("NAME",), values.not_empty),
            example="hvlaunch --profile gpu8 python train.py",
            source="own",
        ),
        Option(
            "isolated",
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
