"""Jump hosts (ProxyJump): which ones a host is behind."""

import re
import threading
from dataclasses import dataclass

from hvlaunch.errors import HostError
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config.ask_ssh import ask_ssh
from hvlaunch.ssh.config.settings import Ask, HostSettings, resolve

__all__ = ["Hop", "Hops", "behind", "parse_hop"]

_WORD = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:@/]+))(?::(?P<port>\d+))?/?"
)


@dataclass(frozen=True, slots=True)
class Hop:
    """A jump host. `key` is the way to it, in words: hosts that share the words share the connection."""

    host: Host
    key: tuple[str, ...]
    jump: str | None
    """The ProxyJump that leads to it, where another's words say so; None leaves it to its own configuration."""


def parse_hop(word: str, *, host: str) -> Host:
    """One word of a ProxyJump: `[user@]name[:port]`, an ssh:// URI included. `host` is for messages.

    Raises HostError.
    """
    found = _WORD.fullmatch(word.strip())
    if found is None:
        raise HostError(f"its ProxyJump has {word!r}, which is not a host", host=host)
    port = found["port"]
    return Host(found["v6"] or found["name"], user=found["user"], port=int(port) if port else None)


class Hops:
    """The jump hosts on the way to hosts, and their settings: each is asked for once. Thread-safe.

    As with OpenSSH, a jump host has nothing of what `options` or a host say of port, user and identity.
    """

    def __init__(self, options: SSHOptions, *, timeout: float, ask: Ask = ask_ssh) -> None:
        self.options = SSHOptions(config=options.config, host_keys=options.host_keys)
        self._timeout = timeout
        self._ask = ask
        self._lock = threading.Lock()
        self._settings: dict[tuple[Host, str | None], HostSettings] = {}

    def settings(self, hop: Host, jump: str | None = None) -> HostSettings:
        """How the jump host is reached; `jump` is a ProxyJump in place of its own. Raises HostError."""
        with self._lock:
            if (hop, jump) not in self._settings:
                self._settings[hop, jump] = resolve(
                    hop, self.options, jump=jump, timeout=self._timeout, ask=self._ask
                )
            return self._settings[hop, jump]

    def before(self, host: str, jump: str | None) -> tuple[Hop, ...]:
        """The jump hosts before `host`, in the order of connecting; `jump` is its ProxyJump.

        The first of a ProxyJump may have one itself. Raises HostError where they go round in circles.
        """
        way: tuple[Hop, ...] = ()
        seen: list[str] = []
        while jump is not None:
            if jump in seen:
                cause = f"its jump hosts form a loop: {' → '.join((*seen, jump))}"
                raise HostError(
                    cause, host=host, hint=f"ssh -v {host} shows them; change the ProxyJump of one"
                )
            seen.append(jump)
            words = jump.split(",")
            way = (
                *(
                    Hop(parse_hop(word, host=host), (word,), ",".join(words[:index]) or None)
                    for index, word in enumerate(words)
                ),
                *way,
            )
            try:
                jump = self.settings(way[0].host).proxy_jump
            except HostError as error:
                raise behind(host, words[0], error) from None
        names = [hop.key[0] for hop in way]
        return tuple(Hop(hop.host, tuple(names[: index + 1]), hop.jump) for index, hop in enumerate(way))


def behind(host: str, jump: str, error: HostError) -> HostError:
    """The error of a jump host, as one of the host behind it."""
    return error.about(host, f"its jump host {jump}: {error.cause}")
