"""What a launcher is to start, and the command line that says so. The builders are pure: one module for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvlaunch.errors import BadUsage

__all__ = ["MANY_HOSTS", "Command", "Request", "host_list", "ssh_arguments"]

MANY_HOSTS = 64
"""From so many hosts on, a launcher's tree of ssh connections is made flat. Source: Horovod."""


class Command(NamedTuple):
    """A command line, and variables for the launcher itself."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """To be the last in its environment, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be started where, in nobody's dialect. What is None or empty was not said."""

    program: str
    """The launcher, as it is to be called."""
    command: tuple[str, ...]
    """What each process runs."""
    hosts: tuple[tuple[str, int], ...]
    """The hosts in use, each with the number of its processes; ranks go host by host."""
    slots: tuple[tuple[str, int], ...] = ()
    """All hosts that were named, with all their slots, for what processes spawn; empty where that is `hosts`."""
    env: tuple[str, ...] = ()
    """Names of variables to hand on; their values are in the launcher's own environment."""
    cwd: str | None = None
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    ssh_words: tuple[str, ...] = ()
    """More words for ssh."""
    interfaces: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    """In place of our own choice, which is to bind nothing."""
    extra: tuple[str, ...] = ()
    """The user's own flags, last of all."""
    tag: bool = False
    """Each line of output gets its rank, by the launcher."""
    timestamp: bool = False
    output: str | None = None
    """A directory for the launcher to write each rank's output to."""
    root: bool = False
    """The launcher runs as root."""
    cores: tuple[tuple[str, int], ...] = ()
    """Processors of hosts, where a scheduler tells them."""
    rankfile: str | None = None
    """Path of a file that says where each rank goes, for a launcher that needs one."""

    @property
    def np(self) -> int:
        return sum(count for _, count in self.hosts)

    @property
    def room(self) -> tuple[tuple[str, int], ...]:
        """Where processes may be, those that are spawned later, too; the first of it is filled first."""
        return self.slots or self.hosts


def host_list(hosts: Sequence[tuple[str, int]]) -> str:
    """`a:4,b:2`"""
    return ",".join(f"{name}:{count}" for name, count in hosts)


def ssh_arguments(request: Request) -> tuple[str, ...]:
    """Words for the ssh that the launcher calls; none where ssh knows all by itself."""
    words: list[str] = []
    if request.port is not None:
        words += ["-p", str(request.port)]
    if request.user is not None:
        words += ["-l", request.user]
    if request.identity is not None:
        words += ["-i", request.identity]
    words += request.ssh_words
    for word in words:
        if any(char.isspace() for char in word):
            raise BadUsage(
                f"{word!r}: must not have a space, since a launcher passes ssh's options on as one string",
                hint="set it in ~/.ssh/config",
            )
    return tuple(words)
