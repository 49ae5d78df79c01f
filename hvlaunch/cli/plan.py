"""The plan of a job, for `--dry-run`: what would be started where, with which environment."""

import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hvlaunch.cli.environment import shown
from hvlaunch.console.masking import MASK, masked, masked_words
from hvlaunch.driver.program.start_frame import default_env, elastic_env, identity_env, shared_env
from hvlaunch.engine.actions import HostAddress, HostNetwork
from hvlaunch.hosts.local import is_local
from hvlaunch.hosts.placement import Placement, needed, place, slots_of
from hvlaunch.job import Host, JobSpec
from hvlaunch.rendezvous.round_messages import worker_id

__all__ = ["command_line", "plan", "quoted", "shown_value"]

_LATER = "(known once connected)"
_DEFAULT = "(set where the host has none)"
_WIDTH = 78  # and two in front of it: a terminal's 80

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
"""Two that differ in all that only a connected host knows: what differs with them is known once connected."""


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
    """The plan as text for people; what may be a secret is masked unless it is to be shown. Connects nowhere, but may ask the resolver for hosts' names.

    The environment is in it where the job is verbose. `left_out` has the names of variables that other hosts do not get, `launcher`
    what there is to say of another launcher. At the end is what starts where. Raises NotEnoughSlots.
    """
    hosts = needed(spec.hosts, spec.np, spec.slots_per_host, spec.map_by)
    places = _places(spec, hosts)
    blocks = [
        *(_environment(spec, places, show_secrets=show_secrets) if spec.verbose else ()),
        _block(
            "set here, and not passed on (-x NAME or --env all passes it on)",
            textwrap.wrap(", ".join(left_out), _WIDTH),
        ),
        _block("working directory", [quoted(spec.cwd)]),
        _block("command", [command_line(spec.command, show_secrets=show_secrets)]),
        launcher,
    ]
    if MASK in "\n".join(blocks):
        blocks.append(f"{MASK} hides what may be a secret; --show-secrets shows it")
    blocks.append(_block(_count(spec, hosts, places), _host_lines(spec, hosts, places, is_local)))
    return "\n\n".join(block for block in blocks if block)


def _block(title: str, lines: Sequence[str]) -> str:
    """Empty without lines."""
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)]) if lines else ""


def _environment(spec: JobSpec, places: Sequence[Placement] | None, *, show_secrets: bool) -> tuple[str, str]:
    by_rank = _by_rank(spec, places or _any_two(spec.np))
    lines = _environment_lines(spec, by_rank, show_secrets=show_secrets)
    return (
        _block("environment of every worker, above its host's own", lines),
        _block("environment by rank", _rank_lines(places, by_rank)),
    )


def command_line(words: Sequence[str], *, show_secrets: bool) -> str:
    """The words as a shell takes them; what may be a secret is masked unless it is to be shown."""
    shown_words = words if show_secrets else masked_words(words)
    return " ".join(word if word == MASK else quoted(word) for word in shown_words)


def quoted(word: str) -> str:
    """The word as a shell takes it, and as one line: what does not print is escaped as in bash's $'...'."""
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
    """Who is where; None where that depends on hosts' GPUs."""
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
        slots = host.slots or spec.slots_per_host
        ranks = (
            "known once connected"
            if places is None
            else _ranks([at for at in places if at.host == host.name])
        )
        rows.append(
            (host.name, str(slots) if slots else "its GPUs, else 1", ranks, _way(spec, host, is_local))
        )
    return list(_table(rows))


def _ranks(places: Sequence[Placement]) -> str:
    """Those of a host."""
    first, last = places[0].rank, places[-1].rank
    if last - first == len(places) - 1:
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(str(at.rank) for at in places)


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
    first, second = (
        shared_env(network, spec.env, _Certificate(network.master_addr), spec.worker_ports, spec.lease)
        for network in _NETWORKS
    )
    known = {name: value if value == second[name] else _LATER for name, value in first.items()}
    known |= {name: _DEFAULT for name in default_env(1, 1) if name not in spec.env}
    known |= {name: values[0] for name, values in by_rank.items() if _is_shared(values)}
    return [f"{shown(name)}={_value(name, known[name], show_secrets=show_secrets)}" for name in sorted(known)]


def _rank_lines(places: Sequence[Placement] | None, by_rank: Mapping[str, Sequence[str]]) -> list[str]:
    own = {name: values for name, values in sorted(by_rank.items()) if not _is_shared(values)}
    if places is None:
        return textwrap.wrap(f"{', '.join(own)}: {_LATER[1:-1]}", _WIDTH)
    if not own:
        return []
    columns = [("rank", *own), *zip(map(str, range(len(places))), *own.values(), strict=True)]
    return list(_blocks(columns))


def _by_rank(spec: JobSpec, places: Sequence[Placement]) -> dict[str, list[str]]:
    """What tells the workers from each other: for each variable, its value at rank 0, 1, ..."""
    values: dict[str, list[str]] = {}
    for at in places:
        worker = worker_id(at.host, at.local_rank, 0)
        first, second = (
            identity_env(at, worker=worker, job_id=mark, round_number=0, token=mark, scratch=mark)
            | elastic_env(spec.elastic)
            for mark in "ab"
        )
        for name, value in first.items():
            values.setdefault(name, []).append(value if value == second[name] else _LATER)
    return values


def _any_two(np: int | None) -> list[Placement]:
    """Two places that differ in all that depends on hosts' slots, which are not known yet."""
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
    """A variable's value as a shell takes it, masked unless it is to be shown."""
    if not show_secrets:
        value = masked(name, value)
    return value if value == MASK else quoted(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _blocks(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of the columns, in several blocks below each other where it is too wide; each has the first column."""
    first, *rest = columns
    start = 0
    while start < len(rest):
        end, width = start, max(map(len, first))
        while end < len(rest) and (end == start or width + 2 + max(map(len, rest[end])) <= _WIDTH):
            width += 2 + max(map(len, rest[end]))
            end += 1
        yield from [""] if start else []
        yield from _table(list(zip(first, *rest[start:end], strict=True)))
        start = end
