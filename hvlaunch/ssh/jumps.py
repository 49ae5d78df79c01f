"""Jump hosts (ProxyJump): which ones a host is behind, and one connection to each for all who need it."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hvlaunch.errors import HostError, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.ask_ssh import ask_ssh
from hvlaunch.ssh.settings import Ask, HostSettings, resolve

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Hop", "Hops", "Jumps", "behind", "parse_hop"]

_WORD = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:@/]+))(?::(?P<port>\d+))?/?"
)


class _Closable(Protocol):
    def is_open(self) -> bool: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


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
        raise HostError(f"its ProxyJump has {word!r}, which is no host", host=host)
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
                cause = f"its jump hosts go round in circles: {' → '.join((*seen, jump))}"
                raise HostError(
                    cause, host=host, hint=f"ssh -v {host}, and another ProxyJump for one of them"
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


class Jumps(Generic[C]):
    """The connections to jump hosts, by the way to them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, ...], Future[C]] = {}

    def get(self, key: tuple[str, ...], make: Callable[[], C], *, host: str, timeout: float) -> C:
        """The connection of that key: made by one of those who ask at once, and anew where it is gone.

        `host` is for messages. Raises what `make` raises, for all who wait for it; StartTimeout.
        """
        from concurrent.futures import Future  # noqa: PLC0415 (5 ms, before any connection; few hosts are behind others)
        from concurrent.futures import TimeoutError as TooLate  # noqa: PLC0415

        with self._lock:
            future = self._made.get(key)
            is_mine = future is None or (future.done() and not future.result().is_open())
            if future is None or is_mine:
                future = self._made[key] = Future()
        if is_mine:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001  (those who wait get it too)
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
        try:
            return future.result(timeout)
        except TooLate:
            cause = f"its jump host {key[-1]} was not reached within {timeout:.0f} s"
            raise StartTimeout(cause, host=host) from None

    def close(self) -> None:
        """Close them, the farthest first. May be repeated."""
        with self._lock:
            made = [*self._made.values()]
            self._made.clear()
        for future in reversed(made):
            if future.done():
                future.result().close()


def behind(host: str, jump: str, error: HostError) -> HostError:
    """The error of a jump host, as one of the host behind it."""
    cause = f"its jump host {jump}: {error.cause}"
    about = type(error).__new__(type(error), cause)  # whatever the fields of its kind are
    about.__dict__.update({**error.__dict__, "host": host, "cause": cause})
    return about
