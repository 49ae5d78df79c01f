"""What a user writes for a host: `host`, `user@host:slots`, `gpu[01-04,07]:8`, `[fe80::1]:4`."""

import re
import socket
from collections.abc import Callable, Iterator
from functools import partial

from hvlaunch.errors import BadHost
from hvlaunch.hosts.merge import Mention, merge
from hvlaunch.job import Host

__all__ = ["MAX_SLOTS", "integer", "is_address", "is_user", "parse_host", "parse_hosts"]

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
