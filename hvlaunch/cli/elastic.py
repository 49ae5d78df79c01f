"""The flags that make a job elastic, with horovodrun's names where it has them."""

import dataclasses
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

from hvlaunch.cli import values
from hvlaunch.cli.options import Options
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.placement import slots_of
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = ["add_elastic", "elastic_options", "first_round"]

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ElasticOptions)}
_TIMES = (
    (
        "--elastic-timeout",
        "elastic_timeout",
        "that too few slots are waited for, before the job ends with code 75",
    ),
    (
        "--reset-timeout",
        "reset_timeout",
        "that a worker may take to leave a round that has ended, before it is replaced",
    ),
    ("--restart-window", "restart_window", "that a failure counts against --max-restarts"),
    (
        "--worker-timeout",
        "worker_timeout",
        "that a worker may be silent or stopped before it counts as failed",
    ),
    ("--commit-timeout", "commit_timeout", "that a round may go on without a commit; default: for ever"),
    ("--drain-timeout", "drain_timeout", "that workers of a host that leaves may take to their next commit"),
    ("--exit-grace", "exit_grace", "that the others have to end when the first worker is done"),
    ("--discovery-interval", "discovery_interval", "between two looks at the pool"),
    ("--discovery-timeout", "discovery_timeout", "that the discovery script may take"),
)


def add_elastic(parser: ArgumentParser) -> None:
    """Any of --min-np, --max-np, --host-discovery-script, --max-restarts and --spares makes a job elastic."""
    elastic = parser.add_argument_group(
        "elastic jobs",
        "hosts that come and go, and training that goes on; any of the first five makes a job elastic",
    )
    elastic.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        metavar="N",
        type=values.workers,
        help="with fewer workers than this, wait; default: -np, else 1",
    )
    elastic.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        metavar="N",
        type=values.workers,
        help="use no more; default: every slot",
    )
    elastic.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        type=values.some,
        help="run every second, prints the hosts that there are now, as lines of a hostfile",
    )
    elastic.add_argument(
        "--max-restarts",
        "--reset-limit",
        dest="max_restarts",
        metavar="N",
        type=values.count,
        help="failures to make up for within --restart-window; hosts that come and go don't count; default: no limit",
    )
    elastic.add_argument(
        "--spares",
        metavar="N",
        type=values.count,
        default=None,
        help="workers beyond --max-np that are started, and wait to take a failed one's place at once",
    )
    elastic.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown",
        metavar=("MIN", "MAX"),
        nargs=2,
        type=values.seconds,
        help="seconds that a failing host is excluded, doubled each time; default: for good",
    )
    for flag, name, text in _TIMES:
        default = _DEFAULTS[name]
        told = f"seconds {text}" + ("" if default is None else f"; default: {default:g}")
        elastic.add_argument(flag, metavar="SECONDS", type=values.seconds, help=told)


def elastic_options(options: Options) -> ElasticOptions | None:
    """None where the job is not elastic. Raises BadUsage."""
    chosen = (
        options.min_np,
        options.max_np,
        options.host_discovery_script,
        options.max_restarts,
        options.spares,
    )
    times = {name: seconds for _, name, _ in _TIMES if (seconds := getattr(options, name)) is not None}
    if all(one is None for one in chosen):
        given = ["--blacklist-cooldown-range"] if options.cooldown is not None else []
        given += [flag for flag, name, _ in _TIMES if name in times]
        if given:
            raise BadUsage(f"{given[0]} is for elastic jobs", hint="--min-np N")
        return None
    _check(options)
    low, high = options.cooldown or (1.0, 1.0)
    if high < low:
        raise BadUsage(f"--blacklist-cooldown-range {low:g} {high:g}: the first is the larger")
    return ElasticOptions(
        min_np=options.min_np or options.np or 1,
        max_np=options.max_np,
        discovery_script=options.host_discovery_script,
        hostfile=None if options.hostfile is None else Path(options.hostfile),
        max_restarts=options.max_restarts,
        spares=options.spares or 0,
        cooldown=None if options.cooldown is None else (low, high),
        **times,
    )


def _check(options: Options) -> None:
    low, wanted, high = options.min_np, options.np, options.max_np
    for small, large, said in (
        (low, wanted, f"--min-np {low} is more than -np {wanted}"),
        (wanted, high, f"-np {wanted} is more than --max-np {high}"),
        (low, high, f"--min-np {low} is more than --max-np {high}"),
    ):
        if small is not None and large is not None and small > large:
            raise BadUsage(said)
    if options.host_discovery_script is not None and (options.hosts or options.hostfile) is not None:
        raise BadUsage("hosts come from --host-discovery-script, or from -H or a hostfile, but not from both")
    if options.launcher is not None:
        raise BadUsage(
            "an elastic job needs hvlaunch's own controller: no MPI starts single workers anew",
            hint="without --mpi, --srun and --jsrun",
        )
    if options.horovod:
        raise BadUsage(
            "--horovod serves static jobs",
            hint="hvlaunch.torch.elastic, which has the names of Horovod's elastic API",
        )


def first_round(spec: JobSpec) -> JobSpec:
    """The static job that an elastic one would begin as, if all hosts got ready now. Runs the discovery script.

    Raises HvlaunchError, as the script's failure or too few slots.
    """
    options = spec.elastic
    if options is None:
        return spec
    if options.discovery_script is not None:
        from hvlaunch.hosts.discovery import HostScript  # noqa: PLC0415 (it loads subprocess)

        script = HostScript(options.discovery_script, options.discovery_timeout)
        spec = replace(spec, hosts=tuple(script.look()))
    slots = sum(slots_of(host, spec.slots_per_host, gpus=0) for host in spec.hosts)
    return replace(spec, np=max(options.min_np, min(slots, options.max_np or slots)))
