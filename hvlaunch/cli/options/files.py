"""Options about what hosts get, and give back: the project, its environment, data, variables and results."""

from hvlaunch.cli.options import Option, OptionGroup, Value, values

__all__ = ["CONTAINERS", "ENVIRONMENT", "FILES"]

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
