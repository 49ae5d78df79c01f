"""Places in a command: words such as `{rank}` or `{port:http}`, which get their values when a worker starts. Pure."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hvlaunch.agent.wire.frames import MOST_PORTS
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import Templates
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "NAMES",
    "Expansion",
    "Neighbour",
    "RolePart",
    "WorkerPlace",
    "escaped",
    "names_in",
    "role_parts",
    "templates_of",
]

# `$` before a brace is a shell's: ${rank}. A brace before anything but a name is JSON's, awk's or Python's. One more level
# fits into a place: {first:--port {port:http}}.
_PLACE = re.compile(r"(?<!\$)(\{?)\{([a-z][a-z_]*)(?::((?:[^{}]|\{[^{}]*\})*))?\}(\}?)")
_PORT_NAME = re.compile(r"[a-z][a-z0-9_-]*")

_PLAIN = (
    *("rank", "size", "local_rank", "local_size", "node_rank", "nnodes"),
    *("host", "host_ip", "hosts", "master_addr", "master_port", "slot_list"),
    *("scratch", "secret"),
)
_WITH_TEXT = {
    "slots": "TEXT",
    "slots_before": "NUMBER",
    "port": "NAME",
    "own_port": "NAME",
    "first": "WORDS",
    "others": "WORDS",
    "role": "NAME:RANK:PORT",
    "each": "TEXT",
}
NAMES = (*(f"{{{name}}}" for name in _PLAIN), *(f"{{{name}:{text}}}" for name, text in _WITH_TEXT.items()))
"""All places, as in messages."""
_ROLE = re.compile(r"([a-z][a-z0-9-]*):(0|[1-9][0-9]*|all):([a-z][a-z0-9_-]*)")
_ADDRESSES = ("host_ip", "master_addr")
_OF_HOST = ("host", "host_ip", "node_rank", "own_port")
"""Places that `{each:TEXT}` takes of each host."""


def templates_of(
    words: Sequence[str],
    env: Mapping[str, str],
    slots: Mapping[str, int],
    *,
    is_per_host: bool,
    has_roles: bool = False,
) -> Templates:
    """Return the command with its places. Raises BadUsage for unknown places."""
    texts = [*words, *env.values()]
    names = [name for text in texts for name in names_in(text)]
    if "own_port" in names and not is_per_host:
        raise BadUsage("{own_port:NAME} is a port for the host's only worker", hint="--per-host")
    if "role" in names and not has_roles:
        raise BadUsage("{role:NAME:RANK:PORT} is for a job with roles", hint="--role")
    ports = tuple(dict.fromkeys(port for text in texts for port in _ports_in(text)))
    if len(ports) > MOST_PORTS:
        raise BadUsage(f"the command names {len(ports)} ports; {MOST_PORTS} are the most")
    counts_gpus = is_per_host and not {"slots", "slot_list"}.isdisjoint(names)
    return Templates(tuple(words), dict(env), ports, dict(slots), counts_gpus)


class RolePart(NamedTuple):
    """A `{role:NAME:RANK:PORT}`."""

    name: str
    rank: str
    """A number, or `all`."""
    port: str
    """The name of a port, `host` or `host_ip`."""


def role_parts(texts: Iterable[str]) -> Iterator[RolePart]:
    """Yield the places that name other roles."""
    for text in texts:
        for _, name, more, _ in _PLACE.findall(text):
            if name == "role":
                yield RolePart(*more.split(":"))
            elif name in ("first", "others", "each"):
                yield from role_parts([more])


class Neighbour(NamedTuple):
    """A host of the worker's round."""

    name: str
    address: str
    ports: tuple[object, ...] = ()
    """In the order of Templates.ports."""


class WorkerPlace(NamedTuple):
    """A worker's place, and what it may know of the others."""

    at: Placement
    master_addr: str
    master_port: object
    hosts: tuple[Neighbour, ...]
    """All hosts of the round, by node_rank."""
    scratch: str
    """The job's private directory on the host, which is removed at its end."""
    secret: str
    """A random word that only the job's workers know."""
    of_role: Callable[[str], str] | None = None
    """The value of a `{role:...}`, in a job with roles."""
    own_ports: tuple[object, ...] = ()
    """Ports of a worker of a role; other workers have those of their host."""

    @property
    def nnodes(self) -> int:
        return len(self.hosts)

    @property
    def is_first(self) -> bool:
        return self.at.rank == 0

    def on(self, node_rank: int) -> "WorkerPlace":
        """Return the same with the host of that number."""
        at = self.at._replace(group_rank=node_rank, host=self.hosts[node_rank].name)
        return self._replace(at=at, own_ports=())


class Expansion:
    """The command and the variables of one worker."""

    def __init__(self, templates: Templates, worker: WorkerPlace, gpus: int | None = None) -> None:
        """`gpus` is the number of GPUs of the worker's host, if known."""
        self._templates = templates
        self._gpus = gpus
        self._worker = worker

    def command(self) -> tuple[str, ...]:
        return tuple(word for text in self._templates.words for word in self._words(text))

    def variables(self) -> dict[str, str]:
        values = {name: self._text(text, self._worker) for name, text in self._templates.env.items()}
        return {name: value for name, value in values.items() if value}

    def _words(self, text: str) -> list[str]:
        match = _PLACE.fullmatch(text)
        if match is None or match[1] or match[2] not in ("first", "others"):
            return [self._text(text, self._worker)]
        if self._worker.is_first is not (match[2] == "first"):
            return []
        # Split before its places get their values: a value is never a shell's text.
        return [self._text(word, self._worker) for word in shlex.split(match[3])]

    def _text(self, text: str, worker: WorkerPlace) -> str:
        """Replace places by their values, and `{{rank}}` by `{rank}`."""

        def replacement(match: "re.Match[str]") -> str:
            before, name, more, after = match.groups()
            if before and after:
                return match[0][1:-1]
            value = self._value(name, more or "", worker)
            # An IPv6 address before a port: {host_ip}:{port:x}.
            if name in _ADDRESSES and ":" in value and text[match.end() :][:1] == ":":
                value = f"[{value}]"
            return before + value + after

        return _PLACE.sub(replacement, text)

    def _value(self, name: str, more: str, worker: WorkerPlace) -> str:
        hosts = worker.hosts
        match name:
            case "first" | "others":
                return self._text(more, worker) if worker.is_first is (name == "first") else ""
            case "each":
                return ",".join(self._text(more, worker.on(index)) for index in range(len(hosts)))
            case "port":
                return self._port(hosts[0], more)
            case "own_port":
                return self._port(hosts[worker.at.group_rank], more, worker.own_ports)
            case "role":
                return "" if worker.of_role is None else worker.of_role(more)
            case "slots":
                return str(self._slots(worker.at.host) or more)
            case "slot_list":
                return ",".join(map(str, range(self._slots(worker.at.host) or 0)))
            case "slots_before":
                before = hosts[: worker.at.group_rank]
                return str(sum(self._templates.slots.get(host.name, int(more)) for host in before))
            case "hosts":
                return ",".join(host.name for host in hosts)
            case "host_ip":
                return hosts[worker.at.group_rank].address
            case "node_rank":
                return str(worker.at.group_rank)
            case "rank" | "size" | "local_rank" | "local_size" | "host":
                return str(getattr(worker.at, name))
            case _:
                return str(getattr(worker, name))

    def _slots(self, host: str) -> int | None:
        return self._templates.slots.get(host, self._gpus)

    def _port(self, host: Neighbour, name: str, worker_ports: Sequence[object] = ()) -> str:
        return str((worker_ports or host.ports)[self._templates.ports.index(name)])


def escaped(text: str) -> str:
    """Return a text that stands for itself in a command with places."""
    return _PLACE.sub(lambda match: "{" + match[0] + "}", text)


def names_in(text: str) -> Iterator[str]:
    """Yield the names of places in the text. Raises BadUsage for unknown ones."""
    for before, name, more, after in _PLACE.findall(text):
        if before and after:
            continue
        place = "{" + name + (f":{more}" if more else "") + "}"
        if name not in _PLAIN and name not in _WITH_TEXT:
            raise BadUsage(
                f"unknown place {place} in the command; places are {' '.join(NAMES)}",
                hint=f"{{{{{name}}}}} for the word itself",
            )
        if name in _PLAIN and more:
            raise BadUsage(f"{{{name}}} takes no text, and {place} has one")
        if name in ("port", "own_port") and not _PORT_NAME.fullmatch(more):
            raise BadUsage(f"{place} needs the name of a port, in small letters", hint="{port:http}")
        if name == "role" and not _ROLE.fullmatch(more):
            raise BadUsage(
                f"{place} needs a role, a rank in it or `all`, and a port", hint="{role:gen:0:http}"
            )
        if name == "slots_before" and not more.isdecimal():
            raise BadUsage(
                f"{place} needs the slots of a host for which none are given", hint="{slots_before:1}"
            )
        if name in ("first", "others"):
            _check_split(place, more)
        yield name
        if name in ("first", "others", "each"):
            inner = list(names_in(more))
            if name == "each" and not set(inner) <= {*_OF_HOST, "slots"}:
                raise BadUsage(f"{place}: {{each:TEXT}} may name {', '.join(_OF_HOST)} and slots")
            yield from inner


def _check_split(place: str, words: str) -> None:
    try:
        shlex.split(words)
    except ValueError as error:
        raise BadUsage(f"{place}: {str(error).lower()}") from None


def _ports_in(text: str) -> Iterator[str]:
    """Yield the names of ports in the text."""
    for _, name, more, _ in _PLACE.findall(text):
        if name in ("port", "own_port"):
            yield more
        elif name in ("first", "others", "each"):
            yield from _ports_in(more)
