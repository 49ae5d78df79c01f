"""From options to a job: the only place where flags, files and this process's environment meet."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hvlaunch.cli.elastic import elastic_options
from hvlaunch.cli.environment import MAX_STRING, user_env
from hvlaunch.cli.options import Options
from hvlaunch.cli.output import console_options
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.allocation import Allocation, allocation
from hvlaunch.hosts.hostfile import read_hostfile
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.job import Host, JobSpec, MPIOptions, SSHOptions

__all__ = ["current_directory", "job_spec"]


def job_spec(options: Options, environ: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """The job that the options ask for, and warnings of one line each.

    `environ` is the driver's environment. Reads the files that the options name, and resolves no host.
    Raises BadUsage.
    """
    _check_command(options.command)
    env, warnings = user_env(
        environ,
        mode="all" if options.env == "all" else "default",
        files=[Path(name) for name in options.env_file],
        chosen=options.x,
        more=("HOROVOD_*",) if options.horovod else (),
    )
    given = _allocation(options, environ)
    spec = JobSpec(
        command=options.command,
        hosts=_hosts(options) if given is None else given.hosts,
        allocation=None if given is None else given.origin,
        cwd=_cwd(options.cwd, environ),
        np=options.np,
        elastic=elastic_options(options),
        slots_per_host=options.slots_per_host,
        network_interfaces=tuple(
            name.strip() for names in options.network_interfaces for name in names.split(",") if name.strip()
        ),
        horovod=options.horovod,
        relay=options.rendezvous_relay,
        rendezvous_port=options.rendezvous_port,
        worker_ports=options.worker_port_range,
        env=env,
        stdin=options.stdin,
        output_dir=None if options.output_filename is None else Path(options.output_filename),
        console=console_options(options),
        events=None if options.events is None else Path(options.events),
        ssh=_ssh(options, None if given is None else given.remote_agent),
        mpi=_mpi(options),
        remote_python=options.remote_python,
        start_timeout=options.start_timeout,
        lease=options.lease,
        grace=options.grace,
        verbose=options.verbose,
    )
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
    said = environ.get("PWD", "")
    try:
        same = said.startswith("/") and Path(said).samefile(actual)
    except (OSError, ValueError):
        same = False
    return said if same else actual


def _cwd(said: str | None, environ: Mapping[str, str]) -> str:
    if said is None:
        return current_directory(environ)
    return said if said.startswith("/") else str(PurePosixPath(current_directory(environ), said))


def _allocation(options: Options, environ: Mapping[str, str]) -> Allocation | None:
    """The scheduler's, where the user named no hosts. --slots-per-host comes before its slots."""
    named = (options.hosts, options.hostfile, options.host_discovery_script)
    if options.no_scheduler or any(one is not None for one in named):
        return None
    found = allocation(environ)
    if found is None or options.slots_per_host is None:
        return found
    return found._replace(hosts=tuple(replace(host, slots=None) for host in found.hosts))


def _hosts(options: Options) -> tuple[Host, ...]:
    if options.host_discovery_script is not None:
        return ()
    if options.hosts is not None:
        return tuple(parse_hosts(options.hosts))
    if options.hostfile is not None:
        return tuple(read_hostfile(Path(options.hostfile)))
    return (Host("localhost", slots=options.np),)


def _ssh(options: Options, remote_agent: str | None) -> SSHOptions:
    return SSHOptions(
        port=options.ssh_port,
        user=options.ssh_user,
        identity=_file(options.ssh_identity_file, "-i/--ssh-identity-file"),
        config=_file(options.ssh_config, "--ssh-config"),
        host_keys=options.host_keys,
        client=options.ssh_client,
        connect_limit=options.connect_limit,
        remote_agent=remote_agent,
    )


def _mpi(options: Options) -> MPIOptions | None:
    if options.launcher is None:
        for flag, said in (
            ("--mpirun", options.mpirun),
            ("--mpi-args", options.mpi_args),
            ("--binding-args", options.binding_args),
        ):
            if said:
                raise BadUsage(
                    f"{flag} is for a launcher, and hvlaunch itself starts the workers", hint="--mpi"
                )
        return None
    if options.launcher != "mpirun" and options.mpirun is not None:
        raise BadUsage(f"--mpirun is for --mpi, and it is {options.launcher} that starts the workers")
    return MPIOptions(
        launcher=options.launcher,
        program=options.mpirun,
        args=tuple(word for words in options.mpi_args for word in words),
        binding=tuple(word for words in options.binding_args for word in words),
    )


def _file(name: str | None, flag: str) -> Path | None:
    if name is None:
        return None
    try:
        path = Path(name).expanduser()
        path.open("rb").close()
    except OSError as error:
        raise BadUsage(f"{flag} {name}: {(error.strerror or str(error)).lower()}") from None
    except (RuntimeError, ValueError) as error:  # no home directory for the ~; a NUL in the path
        raise BadUsage(f"{flag} {name!r}: {error}") from None
    return path


def _check_command(command: tuple[str, ...]) -> None:
    for index, word in enumerate(command):
        if "\0" in word:
            raise BadUsage(f"word {index + 1} of the command has a NUL byte")
        size = len(os.fsencode(word))
        if size >= MAX_STRING:
            raise BadUsage(
                f"word {index + 1} of the command takes {size} bytes; no process can be started with more than "
                f"{MAX_STRING - 1}",
                hint="a file",
            )
