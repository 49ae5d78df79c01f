"""From options to a job: the only place where flags, files and this process's environment meet.

What an option sets by itself, the table of options says; here is what several decide together.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hvlaunch.cli.elastic import elastic_options
from hvlaunch.cli.environment import MAX_STRING, user_env
from hvlaunch.cli.options.given import Options
from hvlaunch.cli.options.settings import Setting
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.console.prefix import ASCTIME, Prefix
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.allocation import Allocation, allocation
from hvlaunch.hosts.hostfile import read_hostfile
from hvlaunch.hosts.local import launcher_of
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.hosts.placement import slots_of, unlikely
from hvlaunch.job import ConsoleOptions, Host, JobSpec, MPIOptions, SSHOptions

__all__ = ["current_directory", "job_spec"]

_OFTEN_MISPLACED = frozenset(
    [
        "-np",
        "--np",
        "--num-proc",
        "-H",
        "-hosts",
        "--hosts",
        "-hostfile",
        "--hostfile",
        "-machinefile",
        "--machinefile",
    ]
)
"""Those of `misplaced`, which is loaded for commands that have one of them."""


_FAMILIAR = frozenset(["nnodes", "nproc_per_node", "include", "exclude", "map_by"])
"""Those of `familiar`, which is loaded for lines that have one of them."""

_NAME_HOSTS = frozenset(["hosts", "hostfile", "host_discovery_script"])


def job_spec(options: Options, environ: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """The job that the options ask for, and warnings of one line each.

    `environ` is the driver's environment. Reads the files that the options name, and resolves no host.
    Raises BadUsage.
    """
    command = ("python", "-m", *options.command) if options.module else options.command
    _check_command(command)
    _check_last_rank(options)
    options = _of_pool(options) if options.pool else options
    host_warnings: list[str] = []
    scheduled = _allocation(options, environ)
    hosts = _hosts(options, host_warnings.append) if scheduled is None else scheduled.hosts
    per_host = None
    if "nproc_per_node" in options.given:
        from hvlaunch.cli.familiar import workers_per_host  # noqa: PLC0415 (few lines have it)

        per_host = workers_per_host(options, hosts)
    elastic = elastic_options(options, per_host)
    variables = options.variables()
    uses_horovod = options.given.get("horovod", bool(variables) and elastic is None)
    env, warnings = user_env(
        environ,
        mode="all" if options.env == "all" else "default",
        files=[Path(name) for name in options.env_file],
        chosen=options.x,
        more=("HOROVOD_*",) if uses_horovod else (),
        variables=variables,
    )
    if not options.is_marked and not _OFTEN_MISPLACED.isdisjoint(
        word.partition("=")[0] for word in options.command
    ):
        from hvlaunch.cli.misplaced import misplaced  # noqa: PLC0415 (few commands have such words)

        warnings += misplaced(options.command, options.given)
    warnings += host_warnings
    spec = JobSpec(
        command=command,
        hosts=hosts,
        force_slots=_force_slots(options, hosts, per_host),
        allocation=None if scheduled is None else scheduled.origin,
        cwd=_cwd(options.cwd, environ),
        detach=options.given.get("detach", "never"),
        elastic=elastic,
        env=env,
        console=_console(options),
        ssh=_ssh(options, None if scheduled is None else scheduled.remote_agent),
        mpi=_mpi(options),
        **{**options.fields(), "horovod": uses_horovod},
    )
    if spec.pool is not None:
        from hvlaunch.cli.pool_hosts import with_pool  # noqa: PLC0415 (few lines have it)

        spec = with_pool(spec, environ, has_hosts=_names_hosts(options))
    if not _FAMILIAR.isdisjoint(options.given):
        from hvlaunch.cli.familiar import with_familiar  # noqa: PLC0415 (as above)

        spec = with_familiar(spec, options, per_host)
    if spec.detach != "never" and (launcher := launcher_of(spec)) is not None:
        warnings.append(
            f"no other driver can take over a job of {launcher}: if hvlaunch's is killed, the job ends"
        )
    elif spec.detach != "never" and "reconnect_timeout" not in options.given:
        spec = replace(spec, reconnect_timeout=spec.lease)  # time for another driver
    return spec, warnings


def current_directory(environ: Mapping[str, str]) -> str:
    """The working directory as the user's shell names it: a path over links is more often the same on all hosts.

    Raises BadUsage where it was deleted.
    """
    try:
        actual = os.getcwd()  # noqa: PTH109 (a string, for another machine)
    except OSError:
        raise BadUsage(
            "the current directory is gone", hint="--cwd DIR, or hvlaunch from another directory"
        ) from None
    by_shell = environ.get("PWD", "")
    try:
        is_same = by_shell.startswith("/") and Path(by_shell).samefile(actual)
    except (OSError, ValueError):
        is_same = False
    return by_shell if is_same else actual


def _cwd(directory: str | None, environ: Mapping[str, str]) -> str:
    if directory is None:
        return current_directory(environ)
    if directory.startswith("/"):
        return directory
    return str(PurePosixPath(current_directory(environ), directory))


def _of_pool(options: Options) -> Options:
    """Without the hosts that are named in a weaker source than the pool: who names a pool means its hosts."""
    strength = _strength(options.settings["pool"][-1])
    kept = {
        name: settings
        for name, settings in options.settings.items()
        if name not in _NAME_HOSTS or _strength(settings[-1]) >= strength
    }
    return Options(kept, GROUPS, is_marked=options.is_marked)


def _strength(setting: Setting) -> int:
    if not setting.origin:
        return 2
    return 1 if setting.origin == "environment" else 0


def _allocation(options: Options, environ: Mapping[str, str]) -> Allocation | None:
    """The scheduler's, where the user named no hosts. --slots-per-host and --nproc-per-node come before its slots."""
    if _names_hosts(options) or options.no_scheduler or options.pool:
        return None
    found = allocation(environ)
    if found is None or (options.slots_per_host is None and "nproc_per_node" not in options.given):
        return found
    return found._replace(hosts=tuple(replace(host, slots=None) for host in found.hosts))


def _names_hosts(options: Options) -> bool:
    return bool(options.given.keys() & _NAME_HOSTS)


def _force_slots(options: Options, hosts: Sequence[Host], per_host: int | None) -> bool:
    """Whether any number of slots is meant: where it is the number of workers, it is. Raises SlotsUnlikely."""
    is_np = options.np is not None and hosts == _here(options)
    if options.force_slots or is_np:
        return True
    for host in hosts:
        error = unlikely(host.name, slots_of(host, per_host or options.slots_per_host, gpus=0))
        if error is not None:
            raise error
    return False


def _here(options: Options) -> tuple[Host, ...]:
    """The hosts where the user named none."""
    return (Host("localhost", slots=None if "nproc_per_node" in options.given else options.np),)


def _hosts(options: Options, warn: Callable[[str], object]) -> tuple[Host, ...]:
    if options.host_discovery_script is not None:
        return ()
    if options.hosts is not None:
        return tuple(parse_hosts(options.hosts))
    if options.hostfile is not None:
        return tuple(read_hostfile(Path(options.hostfile), warn, is_named=options.names_hostfile))
    return _here(options)


def _console(options: Options) -> ConsoleOptions:
    prefix = options.prefix
    Prefix(prefix)  # raises BadUsage now, not when the first line comes
    fields = options.fields("console")
    if options.prefix_timestamp:
        fields["prefix"] = ASCTIME + prefix
    if options.tee or options.redirects:
        if options.output_filename is None:
            name = "--tee" if options.tee else "--redirects"
            raise BadUsage(f"{name} needs a directory for the files", hint="--output-filename DIR")
        hidden = (options.redirects or frozenset()) - (options.tee or frozenset())
        fields["hidden"] = tuple(sorted(hidden))
    return ConsoleOptions(**fields)


def _ssh(options: Options, remote_agent: str | None) -> SSHOptions:
    ssh = SSHOptions(**{"remote_agent": remote_agent, **options.fields("ssh")})
    if ssh.forward_agent and ssh.client != "openssh":
        raise BadUsage("--forward-agent needs the ssh binary", hint="--ssh-client openssh as well")
    return ssh


def _mpi(options: Options) -> MPIOptions | None:
    launcher = options.launcher
    if launcher is None:
        for option in options.given_in("mpi"):
            raise BadUsage(
                f"{option.flag} is for a launcher, and hvlaunch itself starts the workers", hint="--mpi"
            )
        return None
    if options.skip_bad_hosts:
        raise BadUsage(f"--skip-bad-hosts needs ssh: {launcher} starts the workers on all hosts or on none")
    if launcher != "mpirun" and options.mpirun is not None:
        raise BadUsage(f"--mpirun is for --mpi, but {launcher} starts the workers")
    return MPIOptions(launcher=launcher, **options.fields("mpi"))


def _check_last_rank(options: Options) -> None:
    last, np = options.end_with_rank, options.np
    if last is not None and np is not None and last >= np:
        raise BadUsage(f"--end-with-rank {last}: the job has only ranks 0-{np - 1}")


def _check_command(command: tuple[str, ...]) -> None:
    for index, word in enumerate(command):
        if "\0" in word:
            raise BadUsage(f"word {index + 1} of the command has a NUL byte")
        size = len(os.fsencode(word))
        if size >= MAX_STRING:
            raise BadUsage(
                f"word {index + 1} of the command takes {size} bytes; no process can be started with more than "
                f"{MAX_STRING - 1}",
                hint="pass it in a file",
            )
