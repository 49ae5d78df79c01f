"""The options that other launchers have, and that say something of their own here."""

from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import Group, Option, Value

__all__ = ["FAMILIAR"]

FAMILIAR = Group(
    "known from other launchers",
    pages=(("Coming from another launcher", "coming-from.md"),),
    options=(
        Option(
            "nnodes",
            ("--nnodes",),
            "number of hosts to use, or the fewest and the most",
            Value(("N[:M]",), values.hosts_or_bounds),
            default="all hosts",
            more="The first `N` of the hosts are used. With `N:M` the job is elastic, and needs `--nproc-per-node`: it goes on with `N` "
            "hosts, and takes up to `M`. With `--skip-bad-hosts`, and where an elastic job has `--nproc-per-node`, other hosts take the place of bad ones.",
            example="hvlaunch --nnodes 2 --nproc-per-node 4 -H a,b,c python train.py",
        ),
        Option(
            "nproc_per_node",
            ("--nproc-per-node",),
            "number of workers on each host, or gpu, auto or cpu",
            Value(("N",), values.workers_per_host),
            default="`-np`, else one in every slot",
            more="Each host that is used has so many workers, whatever more slots it has. `gpu` and `auto` are one for each GPU of a host; one without GPUs has "
            "one worker. Where all hosts are this machine, and it has no nvidia-smi, `auto` is one for each processor, and `gpu` is an error. "
            "`cpu` is for this machine alone.",
            example="hvlaunch --nproc-per-node 4 -H a:8,b:8 python train.py",
            aliases=("--nproc_per_node",),
        ),
        Option(
            "module",
            ("-m", "--module"),
            "take the command for a Python module",
            more="`hvlaunch -m train.main --lr 3` starts `python -m train.main --lr 3`. `--no-python` starts the command as it is, "
            "as hvlaunch does without any of these.",
            more_opposites=("--no-python", "--no_python"),
        ),
        Option(
            "tee",
            ("--tee",),
            "streams to show and to keep in files",
            Value(("STREAMS",), values.streams),
            more="1 is stdout, 2 is stderr, 3 is both. It needs `--output-filename` (or `--log-dir`), whose files have all output.",
            example="hvlaunch -np 2 --log-dir logs --redirects 3 --tee 2 python train.py",
        ),
        Option(
            "redirects",
            ("--redirects",),
            "streams to keep in files, and not to show",
            Value(("STREAMS",), values.streams),
            more="In the words of `--tee`, which counts where both name a stream.",
            example="hvlaunch -np 2 --log-dir logs --redirects 1 python train.py",
        ),
        Option(
            "include",
            ("--include",),
            "hosts to use, perhaps with the numbers of their GPUs",
            Value(("HOST[:N,...]@...",), values.not_empty),
            more="Workers of a host with numbers see these GPUs alone, one each.",
            example="hvlaunch -H a:8,b:8,c:8 --include a@c:0,1 python train.py",
            excludes="selection",
        ),
        Option(
            "exclude",
            ("--exclude",),
            "hosts not to use, or the numbers of GPUs of theirs",
            Value(("HOST[:N,...]@...",), values.not_empty),
            example="hvlaunch -H a:8,b:8,c:8 --exclude b@c:0 python train.py",
            excludes="selection",
        ),
        Option(
            "map_by",
            ("--map-by", "-map-by"),
            "how workers are dealt out to hosts: slot, node or ppr:N:node",
            Value(("POLICY",), values.mapping),
            default="slot",
            more="`slot`: they fill the slots of a host, then those of the next. `node`: they go to one host after the other. `ppr:N:node`: "
            "`N` on each host.",
            example="hvlaunch -np 4 -H a:4,b:4 --map-by node python train.py",
        ),
    ),
)
