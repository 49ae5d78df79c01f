"""General options: what hosts get and give back (the project, its environment, data, variables, results), and hvlaunch itself."""

from hvlaunch.cli.options import Option, OptionGroup, Value, values

__all__ = ["CONTAINERS", "ENVIRONMENT", "FILES", "GENERAL"]

FILES = OptionGroup(
    "files",
    pages=(
        ("Copy the project", "../guides/copy-the-project.md"),
        ("Environments", "../guides/environments.md"),
        ("Data and results", "../guides/data-and-results.md"),
    ),
    options=(
        Option(
            "sync",
            ("--sync",),
            "copy the project to the hosts, and start workers in the copy",
            more="The project is the git work tree around this directory, else this directory. What `.gitignore` and "
            "`.hvlaunchignore` name stays here, and so do `.git`, `__pycache__` and virtual environments. Only what a host lacks is sent.",
            example="hvlaunch --sync -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "sync_dir",
            ("--sync-dir",),
            "directory to copy in place of the project; implies `--sync`",
            Value(("DIR",), values.not_empty, completion="directory", path="here"),
            # A file that was found could name a directory with the user's keys.
            source="own",
        ),
        Option(
            "sync_to",
            ("--sync-to",),
            "fixed place of the copy on the hosts; implies `--sync`",
            Value(("PATH",), values.not_empty),
            default="a place in `~/.cache`",
            more="A relative one counts from the home directory. Files there that hvlaunch has not written stay.",
            # A file that was found could name any directory of the hosts.
            source="own",
        ),
        Option(
            "sync_limit",
            ("--sync-limit",),
            "most that a copy may have",
            values.SIZE,
            default="1 GB",
        ),
        Option(
            "setup",
            ("--setup",),
            "command that builds an environment on each host",
            Value(("COMMAND",), values.not_empty),
            more="The host's shell runs it before workers start, in their directory, and again if a file of `--setup-key` has changed. It "
            "builds at `$VIRTUAL_ENV`, where the workers' `PATH` then begins.",
            example="hvlaunch --sync --setup 'uv sync --frozen' -np 8 -H a:4,b:4 python train.py",
            source="own",
        ),
        Option(
            "setup_key",
            ("--setup-key",),
            "file that asks for another environment if it changes",
            Value(("FILE",), values.not_empty, completion="file"),
            more="Lock files, `pyproject.toml` and the like count anyway.",
            repeats="add",
            source="own",
        ),
        Option(
            "bring",
            ("--bring",),
            "copy a file or a directory to the hosts first",
            # A file that was found could name the user's keys.
            Value(("SRC:DST",), values.not_empty),
            repeats="list",
            source="own",
            more="SRC is a path here, or `HOST:PATH` on a host of the job; DST is the name of the copy on each host. Only what a "
            "host lacks is sent.",
            example="hvlaunch --bring ./model:/data/model -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "collect",
            ("--collect",),
            "bring files back from the workers' directory",
            # A file that was found could name the user's keys, where a host is this machine.
            Value(("GLOB[:DIR]",), values.not_empty),
            repeats="list",
            source="own",
            more="They come when the workers have ended, also after a failure or Ctrl-C. Files of host a are in DIR/a, with their "
            "paths below the workers' directory; without DIR it is `results`. `**` matches directories at any depth.",
            example="hvlaunch --collect 'checkpoints/*.pt:out' -np 8 -H a:4,b:4 python train.py",
        ),
        Option(
            "collect_limit",
            ("--collect-limit",),
            "most that comes back, from all hosts together",
            values.SIZE,
            field="collect_limit",
            default="10 GB",
        ),
    ),
)

CONTAINERS = OptionGroup(
    "containers",
    pages=(("Containers", "../guides/containers.md"),),
    options=(
        Option(
            "container",
            ("--container",),
            "run the workers in a new container of this image",
            Value(("IMAGE",), values.not_empty),
            more="Each host pulls the image unless it has it. The current directory, the host's network and GPUs are in the container, and "
            "workers run as the user.",
            example="hvlaunch --container pytorch/pytorch -np 8 -H a:4,b:4 python train.py",
            excludes="container",
            # A file that was found could name any program of the hosts.
            source="own",
        ),
        Option(
            "in_container",
            ("--in-container",),
            "run the workers in this container, which runs already",
            Value(("NAME",), values.not_empty),
            excludes="container",
            source="own",
        ),
        Option(
            "mount",
            ("--mount",),
            "file or directory of the hosts for the new container",
            Value(("SRC[:DST][:ro]",), values.mount),
            repeats="list",
            default="DST is SRC",
            example="hvlaunch --container pytorch/pytorch --mount /data:ro -np 8 -H a:4,b:4 python train.py",
            # A file that was found could name the user's keys.
            source="own",
        ),
        Option(
            "runtime",
            ("--runtime",),
            "program that runs the container",
            Value(choices=("docker", "podman", "apptainer")),
            default="the first that a host has; apptainer for an image that ends with `.sif`",
            source="own",
        ),
    ),
)

ENVIRONMENT = OptionGroup(
    "environment",
    pages=(("The workers' environment", "environment.md#what-you-pass-on"),),
    options=(
        Option(
            "x",
            ("-x",),
            "environment variable for the workers",
            # A file may have a table: [environment.x].
            Value(("NAME[=VALUE]",), completion="variables", is_assignment=True),
            more="With `=VALUE` it has this value, else the value that it has here. A quoted pattern such as `'WANDB_*'` "
            "passes on all variables that match.",
            example="hvlaunch -np 2 -x WANDB_MODE -x NCCL_DEBUG=INFO python train.py",
            repeats="add",
            is_everyday=True,
        ),
        Option(
            "env_file",
            ("--env-file",),
            "file of variables, `NAME=VALUE` on each line",
            values.FILE,
            repeats="add",
        ),
        Option(
            "env",
            ("--env",),
            "pass on `all` variables, or build an environment",
            Value(choices=("all", "conda", "pip", "uv"), read=values.env_mode),
            default="only `PATH`, `PYTHONPATH`, `NCCL_*` and some others",
            more="`all` passes on the variables that other hosts can use. `uv`, `pip` and `conda` build the project's environment on each "
            "host, as `--setup` does.",
            example="hvlaunch --sync --env uv -np 8 -H a:4,b:4 python train.py",
            repeats="add",
            source="own",
        ),
    ),
)

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
