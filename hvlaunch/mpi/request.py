"""From a job to what a launcher is asked for."""

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.allocation import lsf_slots
from hvlaunch.hosts.placement import needed, place
from hvlaunch.job import Host, JobSpec, MPIOptions, SSHOptions
from hvlaunch.mpi.command import Request
from hvlaunch.mpi.detect import Kind, Launcher

__all__ = ["counted", "remote_python", "request_of"]

_T = TypeVar("_T")

_OF_A_SCHEDULER = (Kind.SRUN, Kind.JSRUN)
"""They start processes on the hosts in use alone."""


def counted(spec: JobSpec) -> tuple[tuple[str, int], ...]:
    """The hosts in use, each with the number of its ranks.

    Raises NotEnoughSlots, and BadUsage where a host's slots are not known before something runs there.
    """
    for host in spec.hosts:
        if host.slots is None and spec.slots_per_host is None:
            raise BadUsage(
                "a launcher needs the number of slots",
                host=host.name,
                hint=f"-H {host.name}:N, or --slots-per-host N",
            )
    counts: dict[str, int] = {}
    for at in place(_slots(spec, spec.hosts), spec.np):
        counts[at.host] = counts.get(at.host, 0) + 1
    return tuple(counts.items())


def _slots(spec: JobSpec, hosts: Iterable[Host]) -> tuple[tuple[str, int], ...]:
    return tuple((host.name, host.slots or spec.slots_per_host or 1) for host in hosts)


def remote_python(spec: JobSpec) -> str | None:
    """The interpreter for all hosts. Raises BadUsage where they are to have different ones."""
    return _common("python", (host.python or spec.remote_python for host in _in_use(spec)))


def request_of(
    spec: JobSpec, options: MPIOptions, launcher: Launcher, command: Sequence[str], env: Iterable[str]
) -> Request:
    """What the launcher is asked for, to run `command` with the variables `env`, named.

    Raises BadUsage for what holds for one host only: a launcher calls ssh in the same way for all.
    """
    hosts = _in_use(spec) if launcher.kind in _OF_A_SCHEDULER else spec.hosts
    for host in hosts:
        if host.address is not None:
            raise BadUsage(
                "a launcher finds hosts only by name, so address= can't be used",
                host=host.name,
                hint=f"Host {host.name} and HostName {host.address} in ~/.ssh/config",
            )
    identity = spec.ssh.identity
    return Request(
        program=launcher.program,
        command=tuple(command),
        hosts=counted(spec),
        slots=_slots(spec, hosts),
        env=tuple(sorted(env)),
        port=_common("port", (host.port or spec.ssh.port for host in hosts)),
        user=_common("user", (host.user or spec.ssh.user for host in hosts)),
        identity=_common(
            "identity", (host.identity or (str(identity) if identity else None) for host in hosts)
        ),
        ssh_words=_ssh_words(spec.ssh),
        interfaces=spec.network_interfaces,
        binding=options.binding,
        extra=options.args,
        root=os.geteuid() == 0,
        cores=tuple((lsf_slots(os.environ) or {}).items()) if launcher.kind is Kind.JSRUN else (),
    )


def _in_use(spec: JobSpec) -> list[Host]:
    return needed(spec.hosts, spec.np, spec.slots_per_host)


def _ssh_words(ssh: SSHOptions) -> tuple[str, ...]:
    words: list[str] = []
    if ssh.config is not None:
        words += ["-F", str(ssh.config)]
    if ssh.host_keys == "accept-new":
        words += ["-o", "StrictHostKeyChecking=accept-new"]
    elif ssh.host_keys == "off":
        words += [
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
        ]
    return tuple(words)


def _common(what: str, choices: Iterable[_T | None]) -> _T | None:
    """The one value for all hosts. Raises BadUsage."""
    values = set(choices)
    if len(values) > 1:
        shown = ", ".join(sorted("none" if value is None else str(value) for value in values))
        raise BadUsage(
            f"a launcher uses one {what} for all hosts, and theirs differ ({shown})",
            hint="set it for each host in ~/.ssh/config, or use --gloo",
        )
    return values.pop() if values else None
