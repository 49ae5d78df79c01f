"""A host that is mentioned more than once is one host."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from hvlaunch.errors import BadHost
from hvlaunch.job import Host

__all__ = ["MAX_ALL_SLOTS", "MAX_HOSTS", "Mention", "merge"]

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
