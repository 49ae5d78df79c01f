"""Options about files: the project and data on their way to the hosts, and results on their way back."""

from hvlaunch.cli.options import Option, OptionGroup, Value, values

__all__ = ["FILES"]

FILES = OptionGroup(
    "files",
    pages=(
        ("Copy the project", "../guides/copy-the-project.md"),
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
