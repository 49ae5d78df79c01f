"""DeepSpeed's words for some of the hosts, and some of their GPUs: `a@b:0,2`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_host
from hvlaunch.job import Host

__all__ = ["Selected", "select", "words_for"]

_WORD = re.compile(r"(\[[^\]]*:[^\]]*\]|[^:]*)(:?)(.*)", re.DOTALL)
"""A host, which may be an IPv6 address in brackets, and perhaps numbers."""


class Selected(NamedTuple):
    """The hosts that are left; of those of which only some GPUs are, which."""

    hosts: tuple[Host, ...]
    gpus: dict[str, tuple[int, ...]]


def select(
    hosts: Sequence[Host],
    words: str,
    how: Literal["include", "exclude"],
    slots_per_host: int | None = None,
) -> Selected:
    """Those of the hosts that the words name, or the others, in the hosts' own order. Raises BadUsage.

    As in DeepSpeed's launcher: parts are separated by `@` (here also by commas), and a host without numbers is all of it.
    """
    named = _read(words, f"--{how}")
    if unknown := named.keys() - {host.name for host in hosts}:
        raise BadUsage(f"--{how}: {min(unknown)} is none of the hosts", hint="hvlaunch --dry-run")
    left: list[Host] = []
    gpus: dict[str, tuple[int, ...]] = {}
    for host in hosts:
        if host.name not in named:
            left += [host] if how == "exclude" else []
        elif (numbers := named[host.name]) is None:
            left += [host] if how == "include" else []
        elif chosen := _chosen(host, numbers, how, slots_per_host):
            left.append(replace(host, slots=len(chosen)))
            gpus[host.name] = chosen
    if not left:
        raise BadUsage(f"--{how}: no host is left", hint="hvlaunch --dry-run")
    return Selected(tuple(left), gpus)


def words_for(hosts: Iterable[Host], gpus: Mapping[str, tuple[int, ...]]) -> str:
    """What select() takes to include these hosts, and of some only these GPUs."""
    words: list[str] = []
    for host in hosts:
        name = f"[{host.name}]" if ":" in host.name else host.name
        numbers = ",".join(map(str, gpus.get(host.name, ())))
        words.append(f"{name}:{numbers}" if numbers else name)
    return "@".join(words)


def _chosen(host: Host, numbers: tuple[int, ...], how: str, slots_per_host: int | None) -> tuple[int, ...]:
    slots = host.slots or slots_per_host
    if slots is not None and max(numbers) >= slots:
        raise BadUsage(f"--{how} {host.name}:{max(numbers)}: the host has only the slots 0-{slots - 1}")
    if how == "include":
        return numbers
    if slots is None:
        raise BadUsage(
            f"--{how} {host.name}:{numbers[0]}: the host's slots are not known here",
            hint=f"-H {host.name}:N, or --slots-per-host N",
        )
    return tuple(number for number in range(slots) if number not in numbers)


def _read(words: str, source: str) -> dict[str, tuple[int, ...] | None]:
    """By host, its numbers; None is all of it."""
    named: dict[str, tuple[int, ...] | None] = {}
    for word in _parts(words):
        found = _WORD.fullmatch(word)
        names, colon, numbers = (word, "", "") if found is None else found.groups()
        chosen = _numbers(numbers, word, source) if colon else None
        for host in parse_host(names, source=source):
            if host.name in named:
                raise BadUsage(f"{source}: {host.name} is there twice")
            named[host.name] = chosen
    return named


def _parts(words: str) -> Iterator[str]:
    for part in words.split("@"):
        if ":" in part or "[" in part:
            yield part
        else:
            yield from part.split(",")


def _numbers(text: str, word: str, source: str) -> tuple[int, ...]:
    try:
        numbers = {int(number) for number in text.split(",")}
    except ValueError:
        numbers = {-1}
    if min(numbers) < 0:
        raise BadUsage(f"{source} {word}: after the colon are numbers of GPUs: `host:0,2`")
    return tuple(sorted(numbers))
