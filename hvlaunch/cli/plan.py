"""--dry-run: hosts and ranks, the command and the environment of a job, as text."""

import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvlaunch.cli.environment import shown
from hvlaunch.console.lines import aligned
from hvlaunch.console.masking import MASK, masked, masked_words
from hvlaunch.driver.program.start_frame import (
    default_env,
    elastic_env,
    gpu_env,
    gpus_by_slot,
    identity_env,
    role_env,
    shared_env,
)
from hvlaunch.engine.actions import HostAddress, HostNetwork
from hvlaunch.hosts.local import is_local
from hvlaunch.hosts.placement import Launch, Placement, needed, place, slots_of
from hvlaunch.job import Host, JobSpec, MPIOptions
from hvlaunch.mpi import Kind, find, shell_shim
from hvlaunch.mpi.builders import build, rankfile
from hvlaunch.mpi.request import counted, request_of
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.messages import worker_id

if TYPE_CHECKING:
    from hvlaunch.hosts.templates import Expansion

__all__ = ["command_line", "launcher_plan", "plan", "quoted", "shown_value"]

_LATER = "(known once connected)"
_DEFAULT = "(set where the host has none)"
# A terminal's 80 columns, less an indent of two.
_WIDTH = 78
_MOST_LINES = 12

_NETWORKS = [
    HostNetwork(
        master_addr=mark,
        master_port=port,
        interface=mark,
        rendezvous=(mark, port),
        address=mark,
        hosts=(HostAddress(mark, mark, port),),
    )
    for mark, port in (("a", 1), ("b", 2))
]
"""Two networks without a common value: a variable that differs between them is known only once hosts are connected."""


class _Certificate(NamedTuple):
    fingerprint: str


def plan(
    spec: JobSpec,
    *,
    left_out: Sequence[str] = (),
    launcher: str = "",
    is_local: Callable[[Host], bool] = is_local,
    show_secrets: bool = False,
) -> str:
    """Return the plan as text, with secrets masked unless `show_secrets`.

    Connects to no host, but may ask the resolver for names. A verbose job's plan has the environment. `left_out` names
    variables that other hosts do not get; `launcher` is the section about another launcher. Raises NotEnoughSlots.
    """
    hosts = needed(spec.hosts, spec.np, spec.slots_per_host, spec.map_by)
    places = _places(spec, hosts)
    blocks = [
        _block(_count(spec, hosts, places), _host_lines(spec, hosts, places, is_local)),
        _block("command", list(_commands(spec, places, show_secrets=show_secrets))),
        _block("working directory", [_directory(spec)]),
        _block("container on each host", _container_lines(spec)),
        ""
        if spec.setup is None
        else _block("setup on each host", "\n".join(spec.setup.commands).split("\n")),
        launcher,
        _block("known once connected", _open_choices(spec)),
        _block("bindings", _binding_lines(spec, hosts, places, is_local)),
        *(_environment(spec, places, show_secrets=show_secrets) if spec.verbose else ()),
        _left_out(left_out, is_verbose=spec.verbose),
    ]
    if MASK in "\n".join(blocks):
        blocks.append(f"{MASK} hides what may be a secret; --show-secrets shows it")
    return "\n\n".join(block for block in blocks if block)


def _open_choices(spec: JobSpec) -> list[str]:
    """Return the choices that need the hosts' hardware."""
    adapters = ["adapters for NCCL and Gloo, and the reason for each (--nccl auto)"]
    order = [f"the order of the hosts (--rank-order {spec.rank_order})"]
    return (adapters if spec.nccl == "auto" else []) + (order if spec.rank_order != "given" else [])


def _container_lines(spec: JobSpec) -> list[str]:
    """Return the command of the container, without what each host adds for its user and devices."""
    if spec.container is None:
        return []
    from hvlaunch.agent.container import container_command  # noqa: PLC0415 (few plans need it)

    image, name, runtime, mounts = spec.container
    if image is None:
        return [command_line([runtime or "docker", "exec", "-i", name or "", "..."], show_secrets=True)]
    if runtime is None:
        runtime = "apptainer" if image.endswith(".sif") else "docker"
    paths = [] if spec.sync is not None else [(spec.cwd, spec.cwd, False)]
    paths += [(source, target or source, is_readonly) for source, target, is_readonly in mounts]
    words = container_command(runtime, image, "hvlaunch-...", paths, [], {}, ["/bin/sh", "..."])
    return [command_line(words, show_secrets=True), "and each host's user, cache and GPUs"]


def _left_out(names: Sequence[str], *, is_verbose: bool) -> str:
    advice = "-x NAME or --env all passes it on"
    if is_verbose or not names:
        return _block(f"set here, and not passed on ({advice})", textwrap.wrap(", ".join(names), _WIDTH))
    return f"variables set here, and not passed on: {len(names)} ({advice}; --verbose lists them)"


def _directory(spec: JobSpec) -> str:
    if spec.sync is None:
        return quoted(spec.cwd)
    place = "" if spec.sync.to is None else f", at {quoted(spec.sync.to)}"
    return f"{quoted(spec.sync.below or '.')} in each host's copy of {quoted(spec.sync.root)}{place}"


def _block(title: str, lines: Sequence[str]) -> str:
    """Return a titled block; empty without lines."""
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)]) if lines else ""


def _binding_lines(
    spec: JobSpec, hosts: Sequence[Host], places: Sequence[Placement] | None, is_local: Callable[[Host], bool]
) -> list[str]:
    """Return the bindings of workers on this machine; those of other hosts are known to their agents."""
    if not spec.is_bound:
        return []
    from hvlaunch.agent.workers.binding import bindings, ranges, read_topology  # noqa: PLC0415 (few plans need it)
    from hvlaunch.driver.observing.bindings import table  # noqa: PLC0415 (as above)

    counts = Counter(placement.host for placement in places or ())
    # Workers need Linux, and so does the file system that is read.
    is_linux = sys.platform.startswith("linux")
    here = [host.name for host in hosts if is_linux and counts[host.name] and is_local(host)]
    elsewhere = [host.name for host in hosts if host.name not in here]
    lines = []
    if here:
        topology = read_topology(spec.bind, os.sched_getaffinity(0))
        env = {**os.environ, **spec.env}
        gpus = {name: gpus_by_slot(spec.roles, name) if spec.has_gpus else None for name in here}
        shares = {
            name: bindings(topology, spec.bind, spec.gpus_per_worker, counts[name], env, gpus[name])
            for name in here
        }
        lines = table(
            {
                name: [
                    (
                        "any" if share.cpus is None else ranges(share.cpus),
                        ranges(share.memory) or "any",
                        str(share.threads),
                        ",".join(word for word, _ in share.devices) or "none",
                    )
                    for share in those
                ]
                for name, those in shares.items()
            }
        )
    return lines + [f"{name}: known once connected" for name in elsewhere]


def _environment(spec: JobSpec, places: Sequence[Placement] | None, *, show_secrets: bool) -> tuple[str, str]:
    by_rank = _by_rank(spec, places or _any_two(spec.np))
    lines = _environment_lines(spec, by_rank, show_secrets=show_secrets)
    return (
        _block("environment of every worker, above its host's own", lines),
        _block("environment by rank", _rank_lines(places, by_rank)),
    )


def _commands(spec: JobSpec, places: Sequence[Placement] | None, *, show_secrets: bool) -> Iterator[str]:
    """Yield the command of each worker; one for all if it has no places, or nobody knows the workers yet."""
    if spec.roles:
        yield from _role_commands(spec, show_secrets=show_secrets)
        return
    if spec.templates is None or places is None:
        words = spec.command if spec.templates is None else spec.templates.words
        yield command_line(words, show_secrets=show_secrets)
        return
    from hvlaunch.hosts.templates import Expansion, Neighbour, WorkerPlace  # noqa: PLC0415 (few jobs have places)

    # What is known once connected stays as it is.
    ports = tuple(f"{{port:{name}}}" for name in spec.templates.ports)
    names = dict.fromkeys(placement.host for placement in places)
    hosts = tuple(Neighbour(name, "{host_ip}", ports) for name in names)
    for at in places:
        worker = WorkerPlace(
            at,
            master_addr="{master_addr}",
            master_port="{master_port}",
            hosts=hosts,
            scratch="{scratch}",
            secret="{secret}",  # noqa: S106 (none: the job will have one)
        )
        expanded = _expanded(Expansion(spec.templates, worker), show_secrets=show_secrets)
        yield f"rank {at.rank} on {at.host}: {expanded}"


def _role_commands(spec: JobSpec, *, show_secrets: bool) -> Iterator[str]:
    from hvlaunch.hosts.roles import RoleAddresses, place_roles, ports_by_host  # noqa: PLC0415 (few jobs have roles)
    from hvlaunch.hosts.templates import Expansion, Neighbour, WorkerPlace  # noqa: PLC0415 (as above)

    ports = {host: (host, ["{port}"] * count) for host, count in ports_by_host(spec.roles).items()}
    addresses = RoleAddresses(spec.roles, ports)
    for launch in place_roles(spec.roles):
        if launch.role is None:
            continue
        _, name, at = launch.role
        worker = WorkerPlace(
            at,
            master_addr="{master_addr}",
            master_port="{master_port}",
            hosts=tuple(Neighbour(*host) for host in addresses.hosts(name)),
            scratch="{scratch}",
            secret="{secret}",  # noqa: S106 (none: the job will have one)
            of_role=addresses.value,
            own_ports=addresses.ports(name, at.rank),
        )
        expansion = Expansion(spec.roles[launch.role.number].templates, worker)
        yield f"{launch.role.label} on {at.host}: {_expanded(expansion, show_secrets=show_secrets)}"


def _expanded(expansion: "Expansion", *, show_secrets: bool) -> str:
    """Return the variables and the command of a worker."""
    variables = [
        f"{name}={shown_value(name, value, show_secrets=show_secrets)}"
        for name, value in expansion.variables().items()
    ]
    # A preset's services are a program of many lines.
    brief = [_brief(word) for word in expansion.command()]
    return " ".join([*variables, command_line(brief, show_secrets=show_secrets)])


def _brief(word: str) -> str:
    lines = word.count("\n")
    return f"({lines} lines)" if lines > _MOST_LINES else word


def command_line(words: Sequence[str], *, show_secrets: bool) -> str:
    """Return words quoted for a shell, with secrets masked unless `show_secrets`."""
    shown_words = words if show_secrets else masked_words(words)
    return " ".join(word if word == MASK else quoted(word) for word in shown_words)


def quoted(word: str) -> str:
    """Quote a word for a shell, on one line: unprintable characters are escaped as in bash's $'...'."""
    # An escape sequence in a plan would reach the user's terminal.
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_escaped(char) for char in word) + "'"


def _escaped(char: str) -> str:
    if char in "'\\":
        return f"\\{char}"
    if char.isprintable():
        return char
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    return named or "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))


def _places(spec: JobSpec, hosts: Sequence[Host]) -> list[Placement] | None:
    """Return the placements; None if they depend on hosts' GPUs."""
    if spec.roles:
        from hvlaunch.hosts.roles import place_roles  # noqa: PLC0415 (few jobs have roles)

        return [launch.place for launch in place_roles(spec.roles)]
    # The agents count GPUs, and --dry-run connects to no host.
    if spec.slots_per_host is None and any(host.slots is None for host in hosts):
        return None
    slots = [(host.name, slots_of(host, spec.slots_per_host, gpus=0)) for host in hosts]
    return place(slots, spec.np, spec.map_by)


def _count(spec: JobSpec, hosts: Sequence[Host], places: Sequence[Placement] | None) -> str:
    workers = spec.np if places is None else len(places)
    of_hosts = f"{len(hosts)} host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    if workers is None:
        return f"one worker in every slot of {of_hosts}"
    noun = "worker" if workers == 1 else "workers"
    return f"{workers} {noun} on {'up to ' if places is None and len(hosts) > 1 else ''}{of_hosts}"


def _host_lines(
    spec: JobSpec, hosts: Sequence[Host], places: Sequence[Placement] | None, is_local: Callable[[Host], bool]
) -> list[str]:
    rows = [("host", "slots", "ranks", "reached by")]
    for host in hosts:
        # As slots_of() decides, but without the number of GPUs.
        slots = host.slots or spec.slots_per_host
        ranks = (
            "known once connected"
            if places is None
            else _ranks([placement for placement in places if placement.host == host.name])
        )
        rows.append(
            (host.name, str(slots) if slots else "its GPUs, else 1", ranks, _way(spec, host, is_local))
        )
    return aligned(rows)


def _ranks(places: Sequence[Placement]) -> str:
    """Return a host's ranks: `0-3`, `0,2`."""
    first, last = places[0].rank, places[-1].rank
    if last - first == len(places) - 1:
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(str(placement.rank) for placement in places)


def _way(spec: JobSpec, host: Host, is_local: Callable[[Host], bool]) -> str:
    if is_local(host):
        return "this machine, without ssh"
    settings = {
        "user": host.user or spec.ssh.user,
        "port": host.port or spec.ssh.port,
        "address": host.address,
        "identity": host.identity or spec.ssh.identity,
    }
    return ", ".join(["ssh", *(f"{word} {value}" for word, value in settings.items() if value is not None)])


def _environment_lines(
    spec: JobSpec, by_rank: Mapping[str, Sequence[str]], *, show_secrets: bool
) -> list[str]:
    # A value that differs between two marks is known only to a running job.
    first, second = (
        shared_env(network, spec.env, _Certificate(network.master_addr), spec.worker_ports, spec.lease)
        for network in _NETWORKS
    )
    variables = {name: value if value == second[name] else _LATER for name, value in first.items()}
    variables |= {name: _DEFAULT for name in default_env(1, 1) if name not in spec.env}
    variables |= {name: values[0] for name, values in by_rank.items() if _is_shared(values)}
    return [
        f"{shown(name)}={_value(name, variables[name], show_secrets=show_secrets)}"
        for name in sorted(variables)
    ]


def _rank_lines(places: Sequence[Placement] | None, by_rank: Mapping[str, Sequence[str]]) -> list[str]:
    by_name = {name: values for name, values in sorted(by_rank.items()) if not _is_shared(values)}
    if places is None:
        return textwrap.wrap(f"{', '.join(by_name)}: {_LATER[1:-1]}", _WIDTH)
    if not by_name:
        return []
    columns = [("rank", *by_name), *zip(map(str, range(len(places))), *by_name.values(), strict=True)]
    return list(_blocks(columns))


def _by_rank(spec: JobSpec, places: Sequence[Placement]) -> dict[str, list[str]]:
    """Return variables that differ between workers: for each, its values at rank 0, 1, ..."""
    rows: list[dict[str, str]] = []
    role_launches: Sequence[Launch | None] = [None] * len(places)
    if spec.roles:
        from hvlaunch.hosts.roles import place_roles  # noqa: PLC0415 (few jobs have roles)

        role_launches = place_roles(spec.roles)
    for placement, launch in zip(places, role_launches, strict=True):
        worker = worker_id(placement.host, placement.local_rank, 0)
        at, more = placement, gpu_env(spec.gpus_per_worker)
        if launch is not None and launch.role is not None:
            role = spec.roles[launch.role.number]
            at, more = launch.role.place, gpu_env(role.gpus or None) | role_env(launch, role, len(spec.roles))
        first, second = (
            identity_env(at, worker=worker, job_id=mark, round_number=0, token=mark, scratch=mark)
            | elastic_env(spec.elastic)
            | more
            for mark in "ab"
        )
        rows.append({name: value if value == second[name] else _LATER for name, value in first.items()})
    # Workers of one role may have a variable that those of another lack.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "-") for row in rows] for name in names}


def _any_two(np: int | None) -> list[Placement]:
    """Return two placements that differ in everything that depends on hosts' unknown slots."""
    return [
        Placement(
            host=str(n),
            rank=n,
            local_rank=n,
            cross_rank=n,
            size=np or n,
            local_size=n,
            cross_size=n,
            group_rank=n,
            group_size=n,
        )
        for n in (1, 2)
    ]


def _is_shared(values: Sequence[str]) -> bool:
    return len(set(values)) == 1


def _value(name: str, value: str, *, show_secrets: bool) -> str:
    if value in (_LATER, _DEFAULT):
        return value
    return shown_value(name, value, show_secrets=show_secrets)


def shown_value(name: str, value: str, *, show_secrets: bool) -> str:
    """Return a variable's value quoted for a shell, masked unless `show_secrets`."""
    if not show_secrets:
        value = masked(name, value)
    return value if value == MASK else quoted(value)


def _blocks(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lay out columns as a table; a table that is too wide becomes several, each with the first column."""
    first, *others = columns
    start = 0
    while start < len(others):
        end, width = start, max(map(len, first))
        while end < len(others) and (end == start or width + 2 + max(map(len, others[end])) <= _WIDTH):
            width += 2 + max(map(len, others[end]))
            end += 1
        yield from [""] if start else []
        yield from aligned(list(zip(first, *others[start:end], strict=True)))
        start = end


_RANKFILE = "hvlaunch.erf"
_MASTER_PORT = "29500"  # torch's default


def launcher_plan(
    spec: JobSpec, options: MPIOptions, environ: Mapping[str, str], *, show_secrets: bool = False
) -> str:
    """Return the section as text, without variables that a shell here has with the same value.

    Secrets are masked unless `show_secrets`. Raises HvlaunchError if the launcher is missing or can't do the job.
    """
    launcher = find(options)
    if spec.templates is not None:
        # Only hvlaunch's agents fill in the places of each worker.
        return ""
    # Rank 0 is on the first host; a pasted command has no agent to look for a free port.
    first, _ = counted(spec)[0]
    master = {"MASTER_ADDR": "127.0.0.1" if first == "localhost" else first, "MASTER_PORT": _MASTER_PORT}
    env = {**master, **spec.env}
    request = request_of(spec, options, launcher, (*shell_shim(launcher.kind), *spec.command), env)
    prefix = spec.console.prefix
    command = build(
        launcher,
        replace(
            request,
            cwd=spec.cwd,
            tag=bool(prefix),
            timestamp="{time" in prefix,
            output=None if spec.output_dir is None else str(spec.output_dir),
            rankfile=_RANKFILE,
        ),
    )
    # A pasted command inherits the shell's other variables.
    missing = {name: value for name, value in {**env, **command.env}.items() if environ.get(name) != value}
    words = [
        f"{quoted(name)}={shown_value(name, value, show_secrets=show_secrets)}"
        for name, value in sorted(missing.items())
    ]
    words.append(command_line(command.argv, show_secrets=show_secrets))
    title = f"as a command of {launcher}, to paste (with it hvlaunch itself starts its agents, which start the workers):"
    plan = f"{title}\n  {' '.join(words)}"
    if launcher.kind is not Kind.JSRUN:
        return plan
    lines = [f"  {line}".rstrip() for line in rankfile(request).splitlines()]
    return "\n".join([f"its rankfile, {_RANKFILE}:", *lines, "", plan])
