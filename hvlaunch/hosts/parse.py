"""Hosts as users write them, `gpu[01-04,07]:8`, `[fe80::1]:4`, and sets of hosts and ranks as short text."""

import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from hvlaunch.errors import BadHost
from hvlaunch.job import Host

__all__ = [
    "MAX_ALL_SLOTS",
    "MAX_HOSTS",
    "MAX_SLOTS",
    "Mention",
    "fold_hosts",
    "fold_ranks",
    "host_set",
    "integer",
    "is_address",
    "is_user",
    "merge",
    "number_set",
    "parse_host",
    "parse_hosts",
    "ranges_of",
]

MAX_HOSTS = 65_535
MAX_ALL_SLOTS = 1 << 20
_NAMED = 3
"""Hosts that a sentence lists one by one."""


class Mention(NamedTuple):
    """A host as written by the user."""

    host: Host
    word: str
    source: str
    """`-H`, or the hostfile."""
    line: int | None = None
    """Counts from 1."""


def merge(mentions: Iterable[Mention]) -> list[Host]:
    """Return each host once, in the order of first mention, with its slots added.

    As in Open MPI, a mention without slots counts as a slot if its host is mentioned again. Other fields may be in any
    mention. Raises BadHost for contradicting mentions, or for more hosts or slots than the limits.
    """
    hosts: dict[str, Host] = {}
    slots = 0
    for mention in mentions:
        name = mention.host.name
        hosts[name] = _add(hosts[name], mention) if name in hosts else mention.host
        slots += mention.host.slots or 1
        # Checked at each mention, before a long list takes the memory.
        for count, most, noun in ((len(hosts), MAX_HOSTS, "hosts"), (slots, MAX_ALL_SLOTS, "slots")):
            if count > most:
                cause = f"more than {most} {noun}"
                raise BadHost(cause, word=mention.word, source=mention.source, line=mention.line)
    return list(hosts.values())


def _add(merged_host: Host, mention: Mention) -> Host:
    def agreed(field: str) -> Any:
        before, value = getattr(merged_host, field), getattr(mention.host, field)
        if None not in (before, value) and before != value:
            raise BadHost(
                f"{field} of host {merged_host.name} is {value} here, but {before} earlier",
                word=mention.word,
                source=mention.source,
                line=mention.line,
            )
        return before if value is None else value

    slots = (merged_host.slots or 1) + (mention.host.slots or 1)
    fields = ("user", "port", "identity", "python", "address")
    return replace(merged_host, slots=slots, **{field: agreed(field) for field in fields})


_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def number_set(numbers: Iterable[int]) -> str:
    """Fold numbers: `3`, `0-3,6`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - only a job that fails or merges needs it

    return str(RangeSet.fromlist(str(number) for number in sorted(set(numbers))))


def host_set(hosts: Iterable[str]) -> str:
    """Fold names of hosts: `b`, `gpu[01-07],login`."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return names[0]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - as above

    try:
        # RESOLVER_NOGROUP: `@name` must not start ClusterShell's group commands.
        return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name with brackets or the like, which a hostfile may contain
        return ",".join(names)


def fold_ranks(ranks: Iterable[int]) -> str:
    """Fold ranks: `rank 3`, `ranks 0-3,6`."""
    numbers = set(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {number_set(numbers)}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return hosts for a sentence: `host b`, `hosts a, b and c`, `8 hosts (gpu[01-07],login)`."""
    names = list(dict.fromkeys(hosts))
    *first, last = names
    if not first:
        return f"host {last}"
    if len(names) <= _NAMED:
        return f"hosts {', '.join(first)} and {last}"
    return f"{len(names)} hosts ({host_set(names)})"


def ranges_of(text: str) -> tuple[range, ...]:
    """Convert numbers, inclusive ranges and steps: `0,8-15`, `0-62/2`. Raises ValueError."""
    return tuple(_range_of(part.strip()) for part in text.split(","))


def _range_of(part: str) -> range:
    match = _RANKS.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is neither a rank nor a range such as 8-15")
    first = int(match[1])
    last, step = int(match[2] or first), int(match[3] or 1)
    if last < first or step == 0:
        raise ValueError(f"{part!r} has no rank in it")
    return range(first, last + 1, step)


MAX_SLOTS = 65_535
"""Most slots of a host, and most hosts of a range: more is a typing error, and would take the memory."""

_USER = re.compile(r"\w[\w.+@\\-]*")
_NAME = re.compile(r"\w[\w.-]*")
_PIECE = r"[0-9]{1,18}(?:-[0-9]{1,18}(?:/[0-9]{1,18})?)?"
_RANGE = re.compile(rf"(?![.-])(?:[\w.-]*\[{_PIECE}(?:,{_PIECE})*\])+[\w.-]*")
_BRACKETED = re.compile(r"\[(?P<address>[^\[\]]*)\](?::(?P<slots>.*))?", re.DOTALL)

_Bad = Callable[[str], BadHost]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `-H`: items between commas, each host once, in the order of first mention.

    Raises BadHost, with the item as its `word`.
    """
    words = [word.strip() for word in _split(text)]
    return merge(Mention(host, word, "-H") for word in words for host in parse_host(word, source="-H"))


def parse_host(word: str, *, source: str, line: int | None = None) -> list[Host]:
    """Return the hosts of an item: one, or a range's in the order of ClusterShell's NodeSet.

    `source` and `line` are the item's place, for errors. Raises BadHost.
    """
    bad = partial(BadHost, word=word, source=source, line=line)
    if not word:
        raise bad("a host is missing here, or there is one comma too many")
    user, at, name_and_slots = word.rpartition("@")
    if at and not is_user(user):
        raise bad("the part before the @ is not a user name")
    names, slots = _names_and_slots(name_and_slots, bad)
    count = None if slots is None else integer(slots, MAX_SLOTS)
    if slots is not None and count is None:
        raise bad(f"slots must be a whole number from 1 to {MAX_SLOTS}")
    return [Host(name, slots=count, user=user or None) for name in names]


def integer(text: str, most: int) -> int | None:
    """Return the number from 1 to `most` that `text` spells in ASCII digits, else None."""
    # int() would also accept signs, underscores and other scripts' digits.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def is_user(text: str) -> bool:
    r"""Return whether `text` can be a login name (`DOMAIN\user` and `user@domain` too) and not an option of ssh."""
    return _USER.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Return whether `text` can be a host's name, an IPv4 address or a bare IPv6 address, and not an option of ssh."""
    return _NAME.fullmatch(text) is not None or _is_ipv6(text)


def _split(text: str) -> Iterator[str]:
    """Yield the items of `text`. Commas within brackets do not separate."""
    start = depth = 0
    for index, char in enumerate(text):
        if char == "," and not depth:
            yield text[start:index]
            start = index + 1
        elif char in "[]":
            depth = int(char == "[")
    yield text[start:]


def _names_and_slots(text: str, bad: _Bad) -> tuple[list[str], str | None]:
    bracketed = _BRACKETED.fullmatch(text)
    # Brackets without a colon are a range of hosts.
    if bracketed and ":" in bracketed["address"]:
        if not _is_ipv6(bracketed["address"]):
            raise bad("the part in brackets is not an IPv6 address")
        return [bracketed["address"]], bracketed["slots"]
    if text.count(":") > 1:
        if _is_ipv6(text):
            raise bad(f"an IPv6 address needs brackets: [{text}]")
        raise bad("more than one colon; a host is NAME, NAME:SLOTS or [IPV6]:SLOTS")
    name, colon, slots = text.partition(":")
    return _expand(name, bad) if "[" in name else [_single(name, bad)], slots if colon else None


def _single(name: str, bad: _Bad) -> str:
    if not _NAME.fullmatch(name):
        raise bad("not a host name" if name else "the host's name is missing")
    return name


def _expand(name: str, bad: _Bad) -> list[str]:
    if not _RANGE.fullmatch(name):
        raise bad("not a range of hosts; a range looks like gpu[01-04,07] or gpu[0-8/2]")
    # Counted before ClusterShell expands the range: `a[0-999999999]` would take the memory.
    if _how_many(name) > MAX_SLOTS:
        raise bad(f"the range has more than {MAX_SLOTS} hosts")
    from ClusterShell.NodeSet import (  # noqa: PLC0415 - slow to import, and few jobs have ranges
        RESOLVER_NOGROUP,
        NodeSet,
        NodeSetException,
    )

    try:
        return list(NodeSet(name, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise bad(str(error).replace('"', "")) from None


def _how_many(name: str) -> int:
    """Return an upper bound of the hosts in a range."""
    total = 1
    for brackets in re.findall(r"\[(.*?)\]", name):
        count = 0
        for piece in brackets.split(","):
            first, _, last_and_step = piece.partition("-")
            last, _, step = last_and_step.partition("/")
            count += 1 + max(0, int(last or first) - int(first)) // max(1, int(step or 1))
        total *= count
    return total


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    # inet_pton() does not know zones: `fe80::1%eth0`.
    if percent and not _NAME.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return True
