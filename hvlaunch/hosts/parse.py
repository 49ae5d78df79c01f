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


class Mention(NamedTuple):
    """A host at the place where the user wrote it."""

    host: Host
    word: str
    source: str
    """`-H`, or the hostfile."""
    line: int | None = None
    """Counts from 1."""


def merge(mentions: Iterable[Mention]) -> list[Host]:
    """Each host once, in the order of first mention, with its slots added.

    As in Open MPI, each mention without slots counts as one where a host is mentioned more than once.
    All else may be given in any mention. Raises BadHost where two mentions contradict each other, or hosts or slots
    are more than any job has: before they take the memory.
    """
    hosts: dict[str, Host] = {}
    slots = 0
    for mention in mentions:
        name = mention.host.name
        hosts[name] = _add(hosts[name], mention) if name in hosts else mention.host
        slots += mention.host.slots or 1
        for count, most, noun in ((len(hosts), MAX_HOSTS, "hosts"), (slots, MAX_ALL_SLOTS, "slots")):
            if count > most:
                cause = f"more than {most} {noun}"
                raise BadHost(cause, word=mention.word, source=mention.source, line=mention.line)
    return list(hosts.values())


def _add(known: Host, mention: Mention) -> Host:
    def agreed(field: str) -> Any:
        before, now = getattr(known, field), getattr(mention.host, field)
        if None not in (before, now) and before != now:
            raise BadHost(
                f"{field} of host {known.name} is {now} here, but {before} earlier",
                word=mention.word,
                source=mention.source,
                line=mention.line,
            )
        return before if now is None else now

    slots = (known.slots or 1) + (mention.host.slots or 1)
    fields = ("user", "port", "identity", "python", "address")
    return replace(known, slots=slots, **{field: agreed(field) for field in fields})


_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def number_set(numbers: Iterable[int]) -> str:
    """`3`, `0-3,6`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - only a job that fails or merges needs it

    return str(RangeSet.fromlist(str(number) for number in sorted(set(numbers))))


def host_set(hosts: Iterable[str]) -> str:
    """`b`, `gpu[01-07],login`."""
    known = list(dict.fromkeys(hosts))
    if len(known) == 1:
        return known[0]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - as above

    try:
        return str(NodeSet.fromlist(known, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name that is none of ClusterShell's, which a hostfile may still hold
        return ",".join(known)


def fold_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3,6`."""
    known = set(ranks)
    return f"{'rank' if len(known) == 1 else 'ranks'} {number_set(known)}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """`host b`, `hosts gpu[01-07],login`."""
    known = set(names := list(hosts))
    return f"{'host' if len(known) == 1 else 'hosts'} {host_set(names)}"


def ranges_of(text: str) -> tuple[range, ...]:
    """Numbers, ranges with both ends included, and steps: `0,8-15`, `0-62/2`. Raises ValueError."""
    return tuple(_range_of(part.strip()) for part in text.split(","))


def _range_of(part: str) -> range:
    found = _RANKS.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is neither a rank nor a range such as 8-15")
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    if last < first or step == 0:
        raise ValueError(f"{part!r} has no rank in it")
    return range(first, last + 1, step)


MAX_SLOTS = 65_535
"""Slots of one host, and hosts of one range: more is a typing error, and would use up the memory."""

_USER = re.compile(r"\w[\w.+@\\-]*")
_NAME = re.compile(r"\w[\w.-]*")
_PIECE = r"[0-9]{1,18}(?:-[0-9]{1,18}(?:/[0-9]{1,18})?)?"
_RANGE = re.compile(rf"(?![.-])(?:[\w.-]*\[{_PIECE}(?:,{_PIECE})*\])+[\w.-]*")
_BRACKETED = re.compile(r"\[(?P<address>[^\[\]]*)\](?::(?P<slots>.*))?", re.DOTALL)

_Bad = Callable[[str], BadHost]


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `-H`: items with commas between them, each host once, in the order of first mention.

    Raises BadHost, with the item as its `word`.
    """
    words = [word.strip() for word in _split(text)]
    return merge(Mention(host, word, "-H") for word in words for host in parse_host(word, source="-H"))


def parse_host(word: str, *, source: str, line: int | None = None) -> list[Host]:
    """The hosts of one item: one, or those of a range in the order of ClusterShell's NodeSet.

    `source` and `line` say where the item stands, for the error. Raises BadHost.
    """
    bad = partial(BadHost, word=word, source=source, line=line)
    if not word:
        raise bad("a host is missing here, or there is one comma too many")
    user, at, rest = word.rpartition("@")
    if at and not is_user(user):
        raise bad("the part before the @ is not a user name")
    names, slots = _names_and_slots(rest, bad)
    count = None if slots is None else integer(slots, MAX_SLOTS)
    if slots is not None and count is None:
        raise bad(f"slots must be a whole number from 1 to {MAX_SLOTS}")
    return [Host(name, slots=count, user=user or None) for name in names]


def integer(text: str, most: int) -> int | None:
    """The number from 1 to `most` that `text` spells in ASCII digits; None if it spells none."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def is_user(text: str) -> bool:
    r"""Whether `text` can be a login name (also `DOMAIN\user`, `user@domain`) and is no option of ssh."""
    return _USER.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether `text` can be a host's name, IPv4 address, or IPv6 address without brackets; no option of ssh."""
    return _NAME.fullmatch(text) is not None or _is_ipv6(text)


def _split(text: str) -> Iterator[str]:
    """The items of `text`: commas within brackets do not part."""
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
    """How many hosts a range has at most, found without making them."""
    total = 1
    for brackets in re.findall(r"\[(.*?)\]", name):
        count = 0
        for piece in brackets.split(","):
            first, _, rest = piece.partition("-")
            last, _, step = rest.partition("/")
            count += 1 + max(0, int(last or first) - int(first)) // max(1, int(step or 1))
        total *= count
    return total


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _NAME.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return True
