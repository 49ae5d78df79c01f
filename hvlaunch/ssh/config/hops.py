"""Jump hosts (ProxyJump) on the way to a host."""

import re
import threading
from typing import NamedTuple

from hvlaunch.errors import HostError
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import Ask, HostSettings, resolve
from hvlaunch.ssh.config.ask_ssh import ask_ssh

__all__ = ["Hop", "Hops", "behind", "parse_hop"]

_WORD = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:@/]+))(?::(?P<port>\d+))?/?"
)


class Hop(NamedTuple):
    """A jump host. `key` is the way to it, in words; equal ways share a connection."""

    host: Host
    key: tuple[str, ...]
    jump: str | None
    """ProxyJump to this host, if another host's ProxyJump determines it; None uses its own configuration."""


def parse_hop(word: str, *, host: str) -> Host:
    """Parse one word of a ProxyJump: `[user@]name[:port]` or an ssh:// URI. `host` is for messages.

    Raises HostError.
    """
    match = _WORD.fullmatch(word.strip())
    if match is None:
        raise HostError(f"its ProxyJump has {word!r}, which is not a host", host=host)
    port = match["port"]
    return Host(match["v6"] or match["name"], user=match["user"], port=int(port) if port else None)


class Hops:
    """The jump hosts and their settings; each is looked up once. Thread-safe.

    As in OpenSSH, the port, user and identity of `options` or of a host do not apply to its jump hosts.
    """

    def __init__(self, options: SSHOptions, *, timeout: float, ask: Ask = ask_ssh) -> None:
        # Only the configuration file and the policy for host keys apply to jump hosts.
        self.options = SSHOptions(config=options.config, host_keys=options.host_keys)
        self._timeout = timeout
        self._ask = ask
        self._lock = threading.Lock()
        self._settings: dict[tuple[Host, str | None], HostSettings] = {}

    def settings(self, hop: Host, jump: str | None = None) -> HostSettings:
        """Return the settings of a jump host; `jump` replaces its own ProxyJump. Raises HostError."""
        with self._lock:
            if (hop, jump) not in self._settings:
                self._settings[hop, jump] = resolve(
                    hop, self.options, jump=jump, timeout=self._timeout, ask=self._ask
                )
            return self._settings[hop, jump]

    def before(self, host: str, jump: str | None) -> tuple[Hop, ...]:
        """Return the jump hosts before `host`, in the order of connecting; `jump` is the host's ProxyJump.

        The first jump host may have a ProxyJump too. Raises HostError for a loop.
        """
        way: tuple[Hop, ...] = ()
        jumps: list[str] = []
        while jump is not None:
            if jump in jumps:
                cause = f"its jump hosts form a loop: {' → '.join((*jumps, jump))}"
                raise HostError(
                    cause, host=host, hint=f"ssh -v {host} shows them; change the ProxyJump of one"
                )
            jumps.append(jump)
            words = jump.split(",")
            way = (
                *(
                    Hop(parse_hop(word, host=host), (word,), ",".join(words[:index]) or None)
                    for index, word in enumerate(words)
                ),
                *way,
            )
            try:
                # The first jump host's own ProxyJump leads to it; the others are reached from their
                # predecessors.
                jump = self.settings(way[0].host).proxy_jump
            except HostError as error:
                raise behind(host, words[0], error) from None
        names = [hop.key[0] for hop in way]
        return tuple(Hop(hop.host, tuple(names[: index + 1]), hop.jump) for index, hop in enumerate(way))


def behind(host: str, jump: str, error: HostError) -> HostError:
    """Turn the error of a jump host into an error of the host behind it."""
    return error.about(host, f"its jump host {jump}: {error.cause}")
