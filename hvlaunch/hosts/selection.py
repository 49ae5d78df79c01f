"""DeepSpeed's syntax for a selection of hosts and GPUs: `a@b:0,2`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_host
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple

__all__ = ["Selected", "select", "words_for"]

_WORD = re.compile(r"(\[[^\]]*:[^\]]*\]|[^:]*)(:?)(.*)", re.DOTALL)
"""A host, possibly an IPv6 address in brackets, with optional numbers."""


class Selected(NamedTuple):
    """The selected hosts, and the GPUs of hosts with a selection of GPUs."""

    hosts: tuple[Host, ...]
    gpus: dict[str, tuple[int, ...]]


def select(
    hosts: Sequence[Host],
    words: str,
    how: Literal["include", "exclude"],
    slots_per_host: int | None = None,
) -> Selected:
    """Return the named hosts, or all others, in the hosts' own order. Raises BadUsage.

    As in DeepSpeed's launcher, `@` separates parts (here also a comma), and a host without numbers is the whole host.
    """
    named = _read(words, f"--{how}")
    if unknown := named.keys() - {host.name for host in hosts}:
        raise BadUsage(f"--{how}: {min(unknown)} is not one of the hosts", hint="hvlaunch --dry-run")
    selected: list[Host] = []
    gpus: dict[str, tuple[int, ...]] = {}
    for host in hosts:
        if host.name not in named:
            selected += [host] if how == "exclude" else []
        elif (numbers := named[host.name]) is None:
            selected += [host] if how == "include" else []
        elif chosen := _chosen(host, numbers, how, slots_per_host):
            # A worker for each selected GPU.
            selected.append(replace(host, slots=len(chosen)))
            gpus[host.name] = chosen
    if not selected:
        raise BadUsage(f"--{how}: no host is left", hint="hvlaunch --dry-run")
    return Selected(tuple(selected), gpus)


def words_for(hosts: Iterable[Host], gpus: Mapping[str, tuple[int, ...]]) -> str:
    """Return select()'s words that include these hosts and GPUs."""
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
    """Return the numbers by host; None for a whole host."""
    named: dict[str, tuple[int, ...] | None] = {}
    for word in _parts(words):
        match = _WORD.fullmatch(word)
        names, colon, numbers = (word, "", "") if match is None else match.groups()
        chosen = _numbers(numbers, word, source) if colon else None
        for host in parse_host(names, source=source):
            if host.name in named:
                raise BadUsage(f"{source}: {host.name} is named twice")
            named[host.name] = chosen
    return named


def _parts(words: str) -> Iterator[str]:
    for part in words.split("@"):
        # Commas in `a:0,1` and `gpu[01,03]` do not separate hosts.
        if ":" in part or "[" in part:
            yield part
        else:
            yield from part.split(",")


def _numbers(text: str, word: str, source: str) -> tuple[int, ...]:
    try:
        numbers = {int(number) for number in text.split(",")}
    except ValueError:
        # Negative numbers and other text get the same error below.
        numbers = {-1}
    if min(numbers) < 0:
        raise BadUsage(f"{source} {word}: the numbers after the colon must be those of GPUs, as in host:0,2")
    return tuple(sorted(numbers))
