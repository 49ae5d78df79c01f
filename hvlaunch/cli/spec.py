"""From options to a job: the only module in which flags, files and this process's environment meet.

The table of options says what an option sets by itself. This module decides what depends on several options: the hosts,
whether the job is elastic, and warnings about options behind the command.
"""

import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

from hvlaunch.cli.environment import MAX_STRING, user_env
from hvlaunch.cli.options.settings import Options, Setting
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.console.lines import ASCTIME, Prefix
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.local import launcher_of
from hvlaunch.hosts.parse import Allocation, allocation, parse_hosts, read_hostfile
from hvlaunch.hosts.placement import in_quota, slots_of, suspects_last, unlikely
from hvlaunch.job import (
    LONG_LEASE,
    BringOptions,
    CollectOptions,
    ConsoleOptions,
    ContainerOptions,
    ElasticOptions,
    Host,
    JobSpec,
    LeaseOptions,
    MPIOptions,
    SetupOptions,
    SSHOptions,
    SyncOptions,
    Templates,
)

if TYPE_CHECKING:
    from hvlaunch.cli.presets import Preset

__all__ = ["current_directory", "elastic_options", "first_round", "job_spec", "misplaced"]

_FAMILIAR = frozenset(["nnodes", "nproc_per_node", "include", "exclude", "map_by"])
"""Options evaluated by job_hosts.py, which is loaded for these and --pool alone."""

_SSH_PORT = 22
"""Not refused as larger ports are, for a host may have so many slots."""
_NAME_HOSTS = frozenset(["hosts", "hostfile", "host_discovery_script"])


def job_spec(options: Options, environ: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """Return the job and warnings of one line each.

    `environ` is the driver's environment. Reads the files that options name, and resolves no host. Raises BadUsage.
    """
    if "role" in options.given:
        from hvlaunch.cli.job_roles import role_lines, with_roles, without_roles  # noqa: PLC0415 (few lines have it)

        lines = role_lines(options)
        spec, warnings = job_spec(without_roles(options, lines), environ)
        return with_roles(spec, options, lines, environ), warnings
    for name in ("role_policy", "role_for", "role_env", "end_with_role"):
        if name in options.given:
            raise BadUsage(f"{options.settings[name][-1].called} is for a job with roles", hint="--role")
    preset = None
    if options.preset is not None:
        from hvlaunch.cli.presets import preset_of, with_preset  # noqa: PLC0415 (few lines have it)

        preset = preset_of(options.preset, environ)
        options = with_preset(options, preset)
    command = ("python", "-m", *options.command) if options.module else options.command
    cwd = _cwd(options.cwd, environ)
    if not options.module and command[0].endswith(".py"):
        from hvlaunch.cli.line import with_python  # noqa: PLC0415 (few lines begin with a script)

        command = with_python(command, cwd)
    _check_command(command)
    _check_last_rank(options)
    # The pool's hosts replace hosts of a file or a variable.
    options = _of_pool(options) if options.pool else options
    host_warnings: list[str] = []
    scheduled = _allocation(options, environ)
    hosts = _hosts(options, host_warnings.append) if scheduled is None else scheduled.hosts
    avoided: tuple[str, ...] = ()
    if options.avoid_suspects:
        from hvlaunch.outside.ledger import Ledger, ledger_directory  # noqa: PLC0415 (few lines have it)

        suspects = Ledger(ledger_directory(environ), host_warnings.append).suspects(time.time())
        avoided = tuple(reversed(suspects))
        hosts = tuple(suspects_last(hosts, avoided))
    per_host = None
    if "nproc_per_node" in options.given:
        from hvlaunch.cli.job_hosts import workers_per_host  # noqa: PLC0415 (few lines have it)

        per_host = workers_per_host(options, hosts)
    elastic = elastic_options(options, per_host)
    if elastic is not None and elastic.save_to is not None:
        # A relative directory counts from this one, as that of --cwd does.
        elastic = replace(elastic, save_to=_cwd(elastic.save_to, environ))
    if elastic is not None and avoided:
        elastic = replace(elastic, avoided=avoided)
    variables = options.variables()
    # An option for Horovod's library implies --horovod, but elastic jobs have no place for it.
    uses_horovod = options.given.get("horovod", bool(variables) and elastic is None)
    env, warnings = user_env(
        environ,
        mode="all" if "all" in options.env else "default",
        files=[Path(name) for name in options.env_file],
        chosen=options.x,
        more=("HOROVOD_*",) if uses_horovod else (),
        variables=variables,
    )
    if preset is not None:
        env = {**env, **preset.keys()}
    # `--` before the command tells that its words are not meant for hvlaunch.
    if not options.is_marked:
        warnings += misplaced(options.command, options.given)
    warnings += host_warnings
    warnings += [
        f"host {host.name} gets {host.slots} workers, since the number behind a host's name is its slots; "
        f"if port {host.slots} of sshd is meant: -H {host.name} -p {host.slots}"
        for host in hosts
        if host.slots == _SSH_PORT
    ]
    spec = JobSpec(
        command=command,
        hosts=hosts,
        force_slots=_force_slots(options, hosts, per_host),
        allocation=None if scheduled is None else scheduled.origin,
        cwd=cwd,
        templates=_templates(options, command, hosts, preset, per_host),
        sync=_sync(options, cwd),
        options=tuple(options.words()),
        bring=_bring(options, hosts, environ),
        collect=_collect(options, environ),
        container=_container(options),
        setup=_setup(options),
        detach=options.given.get("detach", "never"),
        elastic=elastic,
        env=env,
        console=_console(options),
        ssh=_ssh(options, None if scheduled is None else scheduled.remote_agent),
        mpi=_mpi(options),
        **{**options.fields(), "horovod": uses_horovod},
    )
    if spec.pool is not None:
        from hvlaunch.cli.job_hosts import with_pool  # noqa: PLC0415 (few lines have it)

        spec = with_pool(spec, environ, has_hosts=_names_hosts(options))
    if not _FAMILIAR.isdisjoint(options.given):
        from hvlaunch.cli.job_hosts import with_familiar  # noqa: PLC0415 (as above)

        spec = with_familiar(spec, options, per_host)
    if options.lease_gpus or options.lease_slots is not None or options.wait:
        spec = replace(spec, leases=_leases(options, spec))
    # Other static jobs can't go on without a host, and sessions outlast short cuts: the end may as well come early.
    if (elastic is not None or spec.detach != "never") and "lease" not in options.given:
        spec = replace(spec, lease=LONG_LEASE)
    # Only hvlaunch's own agents outlive their driver; a launcher's end with it.
    if spec.detach != "never" and (launcher := launcher_of(spec)) is not None:
        warnings.append(
            f"no other driver can take over a job of {launcher}: if hvlaunch's is killed, the job ends"
        )
    elif spec.detach != "never" and "reconnect_timeout" not in options.given:
        # Time for a successor to connect.
        spec = replace(spec, reconnect_timeout=spec.lease)
    return spec, warnings


def current_directory(environ: Mapping[str, str]) -> str:
    """Return the working directory as the user's shell names it.

    A path over links is more often the same on every host. Raises BadUsage if the directory was deleted.
    """
    try:
        actual = os.getcwd()  # noqa: PTH109 (a string, for another machine)
    except OSError:
        raise BadUsage(
            "the current directory is gone", hint="--cwd DIR, or hvlaunch from another directory"
        ) from None
    by_shell = environ.get("PWD", "")
    try:
        # PWD is inherited, and may be another directory's.
        is_same = by_shell.startswith("/") and Path(by_shell).samefile(actual)
    except (OSError, ValueError):
        is_same = False
    return by_shell if is_same else actual


def _sync(options: Options, cwd: str) -> SyncOptions | None:
    if options.given.keys().isdisjoint(("sync", "sync_dir", "sync_to", "sync_limit")):
        return None
    from hvlaunch.sync.tree import tree_at  # noqa: PLC0415 (few lines have it)

    tree = tree_at(cwd, options.given.get("sync_dir"), options.given.get("sync_limit"))
    return tree._replace(to=options.given.get("sync_to"))


def _templates(
    options: Options,
    command: tuple[str, ...],
    hosts: Sequence[Host],
    preset: "Preset | None",
    per_host: int | None,
) -> Templates | None:
    if not options.templates and preset is None:
        return None
    from hvlaunch.hosts.templates import escaped, templates_of  # noqa: PLC0415 (few lines have it)

    env: Mapping[str, str] = {}
    if preset is not None:
        command = preset.command(command, str if options.templates else escaped)
        # The user's own value is stronger.
        stronger = {name for name, equals, _ in (word.partition("=") for word in options.x) if equals}
        env = {name: text for name, text in preset.environment.items() if name not in stronger}
        preset.check_workers(options, (*command, *env.values()))
    slots = {host.name: host.slots or options.slots_per_host for host in hosts} if per_host == 1 else {}
    given = {name: count for name, count in slots.items() if count}
    return templates_of(command, env, given, is_per_host=per_host == 1)


def _bring(options: Options, hosts: Sequence[Host], environ: Mapping[str, str]) -> tuple[BringOptions, ...]:
    if "bring" not in options.given:
        return ()
    from hvlaunch.cli.options.values import bring_options  # noqa: PLC0415 (few lines have it)

    here = current_directory(environ)
    brings = tuple(bring_options(text, here) for text in options.given["bring"])
    names = {host.name for host in hosts}
    for bring in brings:
        # Without hosts, a script or a file has yet to name them.
        if bring.host is not None and names and bring.host not in names:
            raise BadUsage(
                f"--bring: {bring.host} is no host of this job",
                hint=f"hvlaunch cp -H HOSTS {bring.host}:{bring.source} {bring.path}",
            )
    return brings


def _collect(options: Options, environ: Mapping[str, str]) -> tuple[CollectOptions, ...]:
    if "collect" not in options.given:
        return ()
    from hvlaunch.cli.options.values import collect_options  # noqa: PLC0415 (few lines have it)

    return collect_options(options.given["collect"], current_directory(environ))


def _container(options: Options) -> ContainerOptions | None:
    image, name = options.given.get("container"), options.given.get("in_container")
    if image is None and name is None:
        if "mount" in options.given:
            raise BadUsage("--mount needs a new container", hint="--container IMAGE")
        return None
    if (launcher := options.launcher) is not None:
        raise BadUsage(
            f"{launcher} starts the workers itself, and not in a container",
            hint="without --mpi, or start hvlaunch --mpi within the container",
        )
    if options.pool is not None:
        raise BadUsage("the agents of a warm pool are not in a container", hint="without --pool")
    if name is not None and "mount" in options.given:
        raise BadUsage(
            "--mount is for a new container; one that runs has its mounts", hint="--container IMAGE"
        )
    if name is not None and options.runtime == "apptainer":
        raise BadUsage("--in-container is for docker and podman: Apptainer's containers have no name to find")
    mounts = tuple(options.given.get("mount", ()))
    return ContainerOptions(image, name, options.given.get("runtime"), mounts)


def _setup(options: Options) -> SetupOptions | None:
    names = [name for name in options.env if name != "all"]
    if not names and options.given.keys().isdisjoint(("setup", "setup_key")):
        return None
    from hvlaunch.sync.forms import setup_options  # noqa: PLC0415 (few lines have one)

    return setup_options(names, options.setup, options.setup_key)


def _cwd(directory: str | None, environ: Mapping[str, str]) -> str:
    if directory is None:
        return current_directory(environ)
    if directory.startswith("/"):
        return directory
    return str(PurePosixPath(current_directory(environ), directory))


def _of_pool(options: Options) -> Options:
    """Drop hosts of a weaker source than the pool's: a user who names a pool means the pool's hosts."""
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
    """Return the scheduler's hosts unless the user named some."""
    if _names_hosts(options) or options.no_scheduler or options.pool:
        return None
    scheduled = allocation(environ)
    # --slots-per-host and --nproc-per-node override the scheduler's slots.
    if scheduled is None or (options.slots_per_host is None and "nproc_per_node" not in options.given):
        return scheduled
    return scheduled._replace(hosts=tuple(replace(host, slots=None) for host in scheduled.hosts))


def _names_hosts(options: Options) -> bool:
    return bool(options.given.keys() & _NAME_HOSTS)


def _force_slots(options: Options, hosts: Sequence[Host], per_host: int | None) -> bool:
    """Return whether to accept any number of slots: always if it is the number of workers. Raises SlotsUnlikely."""
    is_np = options.np is not None and hosts == _here(options)
    if options.force_slots or is_np:
        return True
    for host in hosts:
        error = unlikely(host.name, slots_of(host, per_host or options.slots_per_host, gpus=0))
        if error is not None:
            raise error
    return False


def _here(options: Options) -> tuple[Host, ...]:
    """Return the hosts of a job without named hosts."""
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
    # Raises BadUsage now, instead of at the first line of output.
    Prefix(prefix)
    fields = options.fields("console")
    if options.prefix_timestamp:
        fields["prefix"] = ASCTIME + prefix
    if options.tee or options.redirects:
        if options.output_filename is None:
            name = "--tee" if options.tee else "--redirects"
            raise BadUsage(f"{name} needs a directory for the files", hint="--output-filename DIR")
        # --tee shows and keeps a stream, and overrides --redirects.
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
    if options.check:
        raise BadUsage(
            "--check needs hvlaunch's own agents", hint="hvlaunch check with the same hosts, before the job"
        )
    if options.skip_bad_hosts:
        raise BadUsage(f"--skip-bad-hosts needs ssh: {launcher} starts the workers on all hosts or on none")
    if "gpus_per_worker" in options.given:
        raise BadUsage(
            "the launcher deals out GPUs itself", hint="--binding-args, with the launcher's own words"
        )
    if {"bind", "binding_args"} <= options.given.keys():
        raise BadUsage("--bind and --binding-args mean the same", hint="--binding-args alone")
    if launcher != "mpirun" and options.mpirun is not None:
        raise BadUsage(f"--mpirun is for --mpi, but {launcher} starts the workers")
    return MPIOptions(launcher=launcher, **options.fields("mpi"))


def _leases(options: Options, spec: JobSpec) -> LeaseOptions:
    if not options.lease_gpus and options.lease_slots is None:
        raise BadUsage("--wait is for leases", hint="--lease-gpus, or --lease-slots N")
    if spec.elastic is not None:
        raise BadUsage("leases are for static jobs", hint="without --min-np and the other elastic options")
    others = {
        "a launcher": spec.mpi,
        "--pool": spec.pool,
        "--include and --exclude": spec.visible_gpus,
        "--role": spec.roles,
    }
    for word in (word for word, value in others.items() if value):
        raise BadUsage(f"leases and {word} can't be together", hint=f"the job without {word}")
    if spec.np is None and any(host.slots is None for host in spec.hosts):
        raise BadUsage("leases need the number of workers", hint="-np N")
    return LeaseOptions(**options.fields("leases"))


def _check_last_rank(options: Options) -> None:
    last, np = options.end_with_rank, options.np
    if last is not None and np is not None and last >= np:
        raise BadUsage(f"--end-with-rank {last}: the job has only ranks 0-{np - 1}")


def _check_command(command: tuple[str, ...]) -> None:
    for index, word in enumerate(command):
        if "\0" in word:
            raise BadUsage(f"word {index + 1} of the command has a NUL byte")
        # execve(2) limits each argument; the agent would fail only after hosts are connected.
        size = len(os.fsencode(word))
        if size >= MAX_STRING:
            raise BadUsage(
                f"word {index + 1} of the command takes {size} bytes; no process can be started with more than "
                f"{MAX_STRING - 1}",
                hint="pass it in a file",
            )


_MAKES_ELASTIC = {"min_np", "max_np", "host_discovery_script", "max_restarts", "spares"}


def elastic_options(options: Options, per_host: int | None) -> ElasticOptions | None:
    """Return the options of an elastic job; None for a static job.

    `per_host` is the number of workers on each host, or 0 for a worker on each GPU. Raises BadUsage.
    """
    least, most = options.given.get("nnodes", (1, 1))
    if least == most and not options.given.keys() & _MAKES_ELASTIC:
        for option in options.given_in("elastic"):
            raise BadUsage(f"{option.flag} is for elastic jobs", hint="--min-np N")
        return None
    bounds = _bounds(options, per_host)
    _check(options, bounds.get("max_np"))
    hostfile = None if options.hostfile is None else Path(options.hostfile)
    defaults = {
        "min_np": options.np or 1,
        "hostfile": hostfile,
        "is_named": options.names_hostfile,
        "per_host": per_host,
    }
    if "save_every" in options.given and "save_to" not in options.given:
        raise BadUsage("--save-every needs a directory", hint="--save-to DIR")
    return ElasticOptions(**{**defaults, **bounds, **options.fields("elastic")})


def _bounds(options: Options, per_host: int | None) -> dict[str, int]:
    """Convert `--nnodes` to workers, or to hosts if the workers of a host are not known yet. Raises BadUsage."""
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
            raise BadUsage(f"{words} and {name} mean the same", hint=f"without {name}")
    if per_host is None or (per_host == 0 and low > 1):
        raise BadUsage(f"{words} needs the number of workers on each host", hint="--nproc-per-node N")


def _check(options: Options, most: int | None) -> None:
    """Check bounds of workers; `most` is the number of workers on the hosts of `--nnodes`. Raises BadUsage."""
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
            "an elastic job needs hvlaunch's own controller: MPI can't restart a single worker",
            hint="without --mpi, --srun and --jsrun",
        )
    if options.skip_bad_hosts or options.end_with_rank is not None:
        flag, hint = ("--skip-bad-hosts", "without it: an elastic job continues without bad hosts")
        if options.end_with_rank is not None:
            flag, hint = ("--end-with-rank", "--exit-grace: an elastic job is done when its first worker is")
        raise BadUsage(f"{flag} is for static jobs", hint=hint)
    if options.horovod:
        raise BadUsage(
            "--horovod is for static jobs",
            hint="without it, and in the script `import hvlaunch.torch as hvd` in place of Horovod's import",
        )


def first_round(spec: JobSpec) -> JobSpec:
    """Return the static job that an elastic job would begin as if all hosts were ready. Runs the discovery script.

    Raises HvlaunchError if the script fails or slots are missing.
    """
    options = spec.elastic
    if options is None:
        return spec
    if options.discovery_script is not None:
        from hvlaunch.hosts.discovery import HostScript  # noqa: PLC0415 (it loads subprocess)

        script = HostScript(options.discovery_script, options.discovery_timeout)
        spec = replace(spec, hosts=tuple(in_quota(script.read_hosts(), options)))
    slots = sum(slots_of(host, spec.slots_per_host, gpus=0) for host in spec.hosts)
    return replace(spec, np=max(options.min_np, min(slots, options.max_np or slots)))


_MISPLACED = {
    "-np": "np",
    "--np": "np",
    "--num-proc": "np",
    "-H": "hosts",
    "-hosts": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
    "-machinefile": "hostfile",
    "--machinefile": "hostfile",
}
"""Options that programs rarely have themselves, and their names."""

_LAUNCHERS = {"horovodrun", "hvlaunch", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun"}


def misplaced(command: Sequence[str], given: Container[str]) -> list[str]:
    """Return a warning about such an option behind the command, unless it is given before the command too."""
    if _MISPLACED.keys().isdisjoint(word.partition("=")[0] for word in command):
        return []
    for index, (word, following) in enumerate(pairwise((*command, ""))):
        # Options behind another launcher are that launcher's.
        if PurePath(word).name in _LAUNCHERS:
            break
        flag, equals, value = word.partition("=")
        name = _MISPLACED.get(flag)
        if (
            index > 0
            and name
            and not _is_given(name, given)
            and _LIKELY[name](value if equals else following)
        ):
            program = PurePath(command[0]).name
            typed = word if equals else f"{flag} {following}"
            reason = "since it stands behind the command; options of hvlaunch come before"
            return [f"{typed} belongs to {program}, {reason}: hvlaunch {typed} {program} ..."]
    return []


def _is_given(name: str, given: Container[str]) -> bool:
    return name in given or (name == "hosts" and "hostfile" in given)


def _are_hosts(text: str) -> bool:
    """Return whether the text is a list of hosts: several, or with slots, since `-H x` may be anything."""
    try:
        return ("," in text or ":" in text) and bool(parse_hosts(text))
    except BadUsage:
        return False


_LIKELY: dict[str, Callable[[str], bool]] = {
    "np": str.isdecimal,
    "hosts": _are_hosts,
    "hostfile": lambda text: Path(text).is_file(),
}
