"""Roles: --role and the options of a role, from words to a job."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, cast, get_args

from hvlaunch.agent.wire.frames import MOST_PORTS
from hvlaunch.cli.line import with_python
from hvlaunch.cli.options import Option
from hvlaunch.cli.options.settings import Options, Setting, typed_setting
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.hosts.roles import ADDRESSES, EVERY, labels, ports_by_host
from hvlaunch.hosts.templates import role_parts, templates_of
from hvlaunch.job import Host, JobSpec, RestartLimit, Role, RolePolicy
from hvlaunch.named_tuples import NamedTuple

__all__ = ["RoleLine", "role_lines", "with_roles", "without_roles"]

_FORM = re.compile(r"([^=\s]+)=([0-9]+)(?:x([0-9]+))?(?:@(\S+?))?:\s+(\S.*)", re.DOTALL)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_MOST = 100_000
_EXAMPLE = "--role 'train=2x4@a,b: python train.py'"
_OWN = frozenset(
    # Commands of roles always have places.
    [
        "role",
        "role_policy",
        "role_for",
        "role_env",
        "end_with_role",
        "max_restarts",
        "restart_window",
        "templates",
    ]
)
_INSTEAD = {
    "np": "--role NAME=N: ...",
    "preset": "--role-for NAME=PRESET",
    "gpus_per_worker": "--role NAME=1xN: ..., with N GPUs for each worker",
    "end_with_rank": "--end-with-role NAME",
    "module": "python -m in the command of a role",
}
_NOT = (
    *("np", "preset", "gpus_per_worker", "end_with_rank", "module", "skip_bad_hosts", "pool", "launcher", "min_np", "max_np"),
    *("host_discovery_script", "spares", "nnodes", "nproc_per_node", "slots_per_host", "map_by", "rank_order", "include", "exclude"),
)  # fmt: skip
"""Options without a meaning for a job with roles."""


class RoleLine(NamedTuple):
    """A role as the user wrote it."""

    name: str
    workers: int
    gpus: int | None
    hosts: str
    """As after -H; empty for all hosts of the job."""
    command: tuple[str, ...]


def role_lines(options: Options) -> list[RoleLine]:
    """Return the roles of an option. Raises BadUsage."""
    lines = [_line(text) for text in options.role]
    for name, count in Counter(line.name for line in lines).items():
        if count > 1:
            raise BadUsage(f"--role: {count} roles have the name {name}")
    if sum(line.workers for line in lines) > _MOST:
        raise BadUsage(f"--role: more than {_MOST} workers")
    return lines


def _line(text: str) -> RoleLine:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise BadUsage(f"--role {text!r} is not NAME=WORKERS[xGPUS][@HOSTS]: COMMAND", hint=_EXAMPLE)
    name, workers, gpus, hosts, words = match.groups()
    if not _NAME.fullmatch(name):
        raise BadUsage(
            f"--role: {name!r} is no name of a role: small letters, digits and dashes", hint=_EXAMPLE
        )
    if int(workers) < 1:
        raise BadUsage(f"--role {name}: {workers} workers: must be at least 1")
    try:
        command = tuple(shlex.split(words))
    except ValueError as error:
        raise BadUsage(f"--role {name}: {str(error).lower()} in its command") from None
    return RoleLine(name, int(workers), None if gpus is None else int(gpus), hosts or "", command)


def without_roles(options: Options, lines: Sequence[RoleLine]) -> Options:
    """Return the options of the job as a whole, with a command that names the roles. Raises BadUsage."""
    _check(options)
    settings: dict[str, Sequence[Setting]] = {
        name: group for name, group in options.settings.items() if name not in _OWN
    }
    words = [word for line in lines for word in (f"{line.name}:", *line.command)]
    settings[COMMAND.name] = [Setting(COMMAND, tuple(words), words, COMMAND.name)]
    named = ",".join(line.hosts for line in lines if line.hosts)
    if named and not options.given.keys() & {"hosts", "hostfile"}:
        settings["hosts"] = [typed_setting(_option("hosts"), [named], is_off=False)]
    return Options(settings, GROUPS, is_marked=True)


def _check(options: Options) -> None:
    if options.command:
        raise BadUsage("--role has the commands of the job, and there is another one", hint=_EXAMPLE)
    for name in options.given:
        option = _option(name)
        is_elastic = option.part == "elastic" and name not in _OWN
        if name in _NOT or is_elastic or option.variable or name == "horovod":
            flag = options.settings[name][-1].called
            raise BadUsage(
                f"{flag} is not for a job with roles (--role)", hint=_INSTEAD.get(name, f"without {flag}")
            )


def _option(name: str) -> Option:
    return next(option for group in GROUPS for option in group.options if option.name == name)


def with_roles(
    spec: JobSpec, options: Options, lines: Sequence[RoleLine], environ: Mapping[str, str]
) -> JobSpec:
    """Return the job with its roles. Raises BadUsage."""
    policies, presets, env = _of_roles(options, lines)
    shares = _shares(spec.hosts, lines, is_named=bool(options.given.keys() & {"hosts", "hostfile"}))
    roles: list[Role] = []
    for line, share in zip(lines, shares, strict=True):
        policy = policies.get(line.name, "end")
        if policy not in get_args(RolePolicy):
            raise BadUsage(f"--role-policy {line.name}={policy}: one of {', '.join(get_args(RolePolicy))}")
        command, variables = with_python(line.command, spec.cwd), dict[str, str]()
        if line.name in presets:
            from hvlaunch.cli.presets import preset_of  # noqa: PLC0415 (few roles have one)

            preset = preset_of(presets[line.name], environ)
            command, variables = preset.command(command, str), {**preset.environment}
            spec = replace(spec, env={**spec.env, **preset.keys()})
        slots = {} if line.gpus is None else {host: line.gpus for host, _ in share}
        try:
            templates = templates_of(
                command, {**variables, **env.get(line.name, {})}, slots, is_per_host=True, has_roles=True
            )
        except BadUsage as error:
            raise BadUsage(f"--role {line.name}: {error.problem.cause}", hint=error.problem.hint) from None
        roles.append(Role(line.name, share, templates, line.gpus, cast("RolePolicy", policy)))
    _check_parts(roles)
    last = options.end_with_role
    if last is not None:
        _check_name("--end-with-role", last, lines)
    slots_by_host = Counter[str]()
    for role in roles:
        slots_by_host.update(dict(role.workers))
    hosts = [replace(host, slots=slots_by_host[host.name]) for host in spec.hosts if slots_by_host[host.name]]
    return replace(
        spec,
        roles=tuple(roles),
        hosts=tuple(hosts),
        np=sum(line.workers for line in lines),
        end_with_role=last,
        role_limit=RestartLimit(**options.fields("elastic")),
        options=tuple(options.words()),
        console=replace(spec.console, labels=tuple(labels(roles))),
    )


def _of_roles(
    options: Options, lines: Sequence[RoleLine]
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    """Return policies, presets and variables by role. Raises BadUsage."""
    policies = dict(_assigned("--role-policy", options.role_policy, lines))
    presets = dict(_assigned("--role-for", options.role_for, lines))
    env: dict[str, dict[str, str]] = {}
    for text in options.role_env:
        name, colon, variable = text.partition(":")
        key, equals, value = variable.partition("=")
        if not (colon and key and equals):
            raise BadUsage("--role-env needs NAME:VARIABLE=VALUE", hint="--role-env gen:PORT={own_port:http}")
        _check_name("--role-env", name, lines)
        env.setdefault(name, {})[key] = value
    return policies, presets, env


def _assigned(flag: str, texts: Sequence[str], lines: Sequence[RoleLine]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and value):
            raise BadUsage(f"{flag} {text!r} is not NAME=VALUE")
        _check_name(flag, name, lines)
        yield name, value


def _check_name(flag: str, name: str, lines: Sequence[RoleLine]) -> None:
    names = [line.name for line in lines]
    if name not in names:
        raise BadUsage(f"{flag}: no role {name!r}; there are {', '.join(names)}")


def _shares(
    hosts: Sequence[Host], lines: Sequence[RoleLine], *, is_named: bool
) -> list[tuple[tuple[str, int], ...]]:
    """Return hosts and numbers of workers for each role: as even as possible, within the slots. Raises BadUsage."""
    # Only slots of -H or a hostfile are shared by the roles.
    room: dict[str, int] = {
        host.name: host.slots if host.slots is not None and is_named else _MOST for host in hosts
    }
    shares: list[tuple[tuple[str, int], ...]] = []
    for line in lines:
        role_hosts = parse_hosts(line.hosts) if line.hosts else [Host(host.name) for host in hosts]
        for host in role_hosts:
            if host.name not in room:
                raise BadUsage(f"--role {line.name}: {host.name} is no host of -H or the hostfile")
        most = {host.name: min(host.slots or _MOST, room[host.name]) for host in role_hosts}
        if line.workers > sum(most.values()):
            _refuse_too_many(line, sum(most.values()))
        taken: Counter[str] = Counter()
        while taken.total() < line.workers:
            free = [name for name in most if taken[name] < most[name]]
            taken.update(free[: line.workers - taken.total()])
        for name, count in taken.items():
            room[name] -= count
        shares.append(tuple((name, taken[name]) for name in most if taken[name]))
    return shares


def _refuse_too_many(line: RoleLine, slots: int) -> NoReturn:
    noun = "slot" if slots == 1 else "slots"
    raise BadUsage(
        f"--role {line.name}: {line.workers} workers, but its hosts have {slots} {noun} left for it",
        hint="fewer workers, or more slots (host:N)",
    )


def _check_parts(roles: Sequence[Role]) -> None:
    """Refuse places that name a role, a rank or a port that does not exist. Raises BadUsage."""
    by_name = {role.name: role for role in roles}
    for role in roles:
        for port in role.templates.ports:
            if port in (*ADDRESSES, "hosts"):
                raise BadUsage(f"--role {role.name}: a port can't have the name {port}")
        for part in role_parts([*role.templates.words, *role.templates.env.values()]):
            place = f"--role {role.name}: {{role:{':'.join(part)}}}"
            other = by_name.get(part.name)
            if other is None:
                raise BadUsage(f"{place}: no role {part.name!r}; there are {', '.join(by_name)}")
            if part.rank != EVERY and int(part.rank) >= other.size:
                raise BadUsage(f"{place}: {part.name} has only ranks 0-{other.size - 1}")
            if part.port not in (*ADDRESSES, *other.templates.ports):
                raise BadUsage(
                    f"{place}: {part.name} has no port {part.port}",
                    hint=f"{{own_port:{part.port}}} in the command of {part.name}",
                )
    for host, count in ports_by_host(roles).items():
        if count > MOST_PORTS:
            raise BadUsage(f"--role: host {host} would keep {count} ports; {MOST_PORTS} are the most")
