"""The options of horovodrun, which hvlaunch's own options are modelled on."""

from hvlaunch.cli.foreign.foreign_option import other, same
from hvlaunch.cli.options.horovod import HOROVOD

__all__ = ["HOROVODRUN"]

_TUNING = tuple(
    f"{', '.join((*option.flags, *option.aliases, *option.opposites))} {metavars}".rstrip()
    for option in HOROVOD.options
    if not option.field
    for metavars in [" ".join(option.value.metavars or ("LEVEL",)) if option.value else ""]
)
"""What only sets a variable of Horovod's library."""

HOROVODRUN = (
    *same(
        "-np, --num-proc N",
        "-H, --hosts HOSTS",
        "-hostfile, --hostfile FILE",
        "--host-discovery-script SCRIPT",
        "--slots-per-host, --slots N",
        "--min-np, --min-num-proc N",
        "--max-np, --max-num-proc N",
        "--elastic-timeout SECONDS",
        "--reset-limit N",
        "--blacklist-cooldown-range MIN MAX",
        "--network-interfaces, --network-interface NAMES",
        "--start-timeout SECONDS",
        "--output-filename DIR",
        "-prefix-timestamp, --prefix-output-with-timestamp",
        "-p, --ssh-port PORT",
        "-i, --ssh-identity-file FILE",
        "--gloo",
        "--mpi",
        "--jsrun",
        "--mpi-args OPTIONS",
        "--binding-args OPTIONS",
        "--verbose",
        "--config-file FILE",
        "-cb, --check-build",
        "--version",
        "-h, --help",
        *_TUNING,
    ),
    *other("-V; -v is --verbose", "-v"),
)
