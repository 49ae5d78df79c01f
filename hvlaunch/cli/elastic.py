"""Elastic jobs: which options make a job elastic, what can't go together, and the job that one begins as."""

from dataclasses import replace
from pathlib import Path

from hvlaunch.cli.given import Options
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.placement import slots_of
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = ["elastic_options", "first_round"]

_MAKES_ELASTIC = {"min_np", "max_np", "host_discovery_script", "max_restarts", "spares"}


def elastic_options(options: Options) -> ElasticOptions | None:
    """None where the job is not elastic. Raises BadUsage."""
    bounds = _bounds(options)
    if not bounds and not options.given.keys() & _MAKES_ELASTIC:
        for option in options.given_in("elastic"):
            raise BadUsage(f"{option.flag} is for elastic jobs", hint="--min-np N")
        return None
    _check(options)
    hostfile = None if options.hostfile is None else Path(options.hostfile)
    return ElasticOptions(
        **{"min_np": options.np or 1, "hostfile": hostfile, **options.fields("elastic"), **bounds},
    )


def _bounds(options: Options) -> dict[str, int]:
    """Those of `--nnodes N:M`, in workers. Raises BadUsage."""
    low, high = options.given.get("nnodes", (1, 1))
    if low == high:
        return {}
    words = f"--nnodes {low}:{high}"
    for option, name in ((options.min_np, "--min-np"), (options.max_np, "--max-np")):
        if option is not None:
            raise BadUsage(f"{words} and {name} say the same", hint=f"without {name}")
    if options.slots_per_host is None:
        raise BadUsage(f"{words} needs the number of workers on each host", hint="--nproc-per-node N")
    return {"min_np": low * options.slots_per_host, "max_np": high * options.slots_per_host}


def _check(options: Options) -> None:
    low, np, high = options.min_np, options.np, options.max_np
    for small, large, message in (
        (low, np, f"--min-np {low} is more than -np {np}"),
        (np, high, f"-np {np} is more than --max-np {high}"),
        (low, high, f"--min-np {low} is more than --max-np {high}"),
    ):
        if small is not None and large is not None and small > large:
            raise BadUsage(message)
    if options.host_discovery_script is not None and (options.hosts or options.hostfile) is not None:
        raise BadUsage("hosts come from --host-discovery-script, or from -H or a hostfile, but not from both")
    if options.launcher is not None:
        raise BadUsage(
            "an elastic job needs hvlaunch's own controller: no MPI starts a single worker again",
            hint="without --mpi, --srun and --jsrun",
        )
    if options.skip_bad_hosts or options.end_with_rank is not None:
        flag, hint = ("--skip-bad-hosts", "without it: an elastic job goes on without bad hosts")
        if options.end_with_rank is not None:
            flag, hint = ("--end-with-rank", "--exit-grace: an elastic job is done when its first worker is")
        raise BadUsage(f"{flag} is for static jobs", hint=hint)
    if options.horovod:
        raise BadUsage(
            "--horovod is for static jobs",
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
