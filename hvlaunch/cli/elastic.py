"""Elastic jobs: which options make a job elastic, what can't go together, and the job that one begins as."""

from dataclasses import replace
from pathlib import Path

from hvlaunch.cli.options.given import Options
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.placement import slots_of
from hvlaunch.hosts.quota import in_quota
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = ["elastic_options", "first_round"]

_MAKES_ELASTIC = {"min_np", "max_np", "host_discovery_script", "max_restarts", "spares"}


def elastic_options(options: Options, per_host: int | None) -> ElasticOptions | None:
    """None where the job is not elastic. `per_host` is how many workers each host has, 0 for one on each GPU. Raises BadUsage."""
    least, most = options.given.get("nnodes", (1, 1))
    if least == most and not options.given.keys() & _MAKES_ELASTIC:
        for option in options.given_in("elastic"):
            raise BadUsage(f"{option.flag} is for elastic jobs", hint="--min-np N")
        return None
    bounds = _bounds(options, per_host)
    _check(options, bounds.get("max_np"))
    hostfile = None if options.hostfile is None else Path(options.hostfile)
    known = {
        "min_np": options.np or 1,
        "hostfile": hostfile,
        "is_named": options.names_hostfile,
        "per_host": per_host,
    }
    return ElasticOptions(**{**known, **bounds, **options.fields("elastic")})


def _bounds(options: Options, per_host: int | None) -> dict[str, int]:
    """What `--nnodes` means in workers; in hosts where their workers are not counted yet. Raises BadUsage."""
    if "nnodes" not in options.given:
        return {}
    low, high = options.given["nnodes"]
    if low != high:
        _check_bounds(options, low, high, per_host)
    if not per_host:
        return {"most_hosts": high}
    bounds = {"min_np": low * per_host, "max_np": high * per_host}
    if low == high and options.np is not None:
        del bounds["min_np"]
    return bounds


def _check_bounds(options: Options, low: int, high: int, per_host: int | None) -> None:
    words = f"--nnodes {low}:{high}"
    for option, name in ((options.min_np, "--min-np"), (options.max_np, "--max-np")):
        if option is not None:
            raise BadUsage(f"{words} and {name} say the same", hint=f"without {name}")
    if per_host is None or (per_host == 0 and low > 1):
        raise BadUsage(f"{words} needs the number of workers on each host", hint="--nproc-per-node N")


def _check(options: Options, most: int | None) -> None:
    """`most` is how many workers are on the hosts of `--nnodes`."""
    low, np, high = options.min_np, options.np, options.max_np
    all_slots = f"the {most} of --nnodes with --nproc-per-node"
    for small, large, message in (
        (low, np, f"--min-np {low} is more than -np {np}"),
        (np, high, f"-np {np} is more than --max-np {high}"),
        (low, high, f"--min-np {low} is more than --max-np {high}"),
        (low, most, f"--min-np {low} is more than {all_slots}"),
        (np, most, f"-np {np} is more than {all_slots}"),
        (high, most, f"--max-np {high} is more than {all_slots}"),
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
            hint="without it, and in the script `import hvlaunch.torch as hvd` in place of Horovod's import",
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
        spec = replace(spec, hosts=tuple(in_quota(script.look(), options)))
    slots = sum(slots_of(host, spec.slots_per_host, gpus=0) for host in spec.hosts)
    return replace(spec, np=max(options.min_np, min(slots, options.max_np or slots)))
