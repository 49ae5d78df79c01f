"""Calls of the agents to the driver: by TLS, with a proof of the caller's job, until each host has an agent."""

import contextlib
import errno
import hmac
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.caller import LONGEST_ENTRY, WORD_SIZE, Sealed
from hvlaunch.agent.wire.frames import mapping, of, pair, plain, text
from hvlaunch.errors import EXIT_HOSTS, AgentFailed, HvlaunchError, StartTimeout
from hvlaunch.mpi import ALL_NAMES, Kind, names_of, ranks_of
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.serving import Listeners
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from hvlaunch.rendezvous.serving.traffic import UnauthenticatedClients, UnauthenticatedLimits, plain_address
from hvlaunch.ssh.streams import persist

if TYPE_CHECKING:
    import ssl

__all__ = ["AgentCaller", "Arrivals", "CallLimits", "CallListener", "LauncherFailed", "ReturnCalls"]

_PAUSE = 0.1  # seconds, if no file descriptor is left
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_LONGEST = 256
_MOST_RETURN_CALLS = 2
"""Waiting calls of an agent; the oldest of more is closed."""
_FACTS = pair(text(_LONGEST, raw=True), mapping(of(*ALL_NAMES), text(_LONGEST, raw=True), len(ALL_NAMES)))


class CallLimits(NamedTuple):
    """Limits for unauthenticated clients: callers without a proof of their job."""

    strangers: UnauthenticatedLimits = UnauthenticatedLimits(all=1024, from_one_address=256)
    """Their number: each has a thread. The agents of a host may call at once, from a new address."""
    patience: float = 10.0
    """Seconds for the whole exchange, however slowly the client sends."""
    facts: int = 1 << 16
    """Bytes of a caller's facts."""


class AgentCaller(NamedTuple):
    """A calling agent with a proof of this job."""

    connection: Sealed
    hostname: str
    environ: Mapping[str, str]
    """The variables with its rank."""
    word: bytes | None = None
    """The agent's own word, for a call after the first."""


class _Stranger:
    """An unauthenticated client; `due` is the deadline for its proof."""

    def __init__(self, sock: socket.socket, address: str, due: float) -> None:
        self.socket = sock
        self.address = address
        self.due = due


class _Agent:
    def __init__(self, called: Callable[[], None]) -> None:
        self.called = called
        self.calls: deque[Sealed] = deque()


class ReturnCalls:
    """Calls of agents after the loss of their first connection, until the driver takes the calls. Thread-safe.

    Each agent has a word of its own. The word came over the encrypted first connection, so only the agent has the word.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._agents: dict[bytes, _Agent] = {}

    def expect(self, called: Callable[[], None]) -> bytes:
        """Return the word for an agent; `called` runs at each of its calls, in a thread."""
        word = os.urandom(WORD_SIZE // 2).hex().encode("ascii")
        with self._changed:
            self._agents[word] = _Agent(called)
        return word

    def knows(self, word: bytes) -> bool:
        """True if the word is an agent's."""
        with self._changed:
            words = [*self._agents]
        # A dictionary's look-up would take a time that depends on how much of the word is right.
        return any(hmac.compare_digest(word, agent_word) for agent_word in words)

    def add(self, word: bytes, call: Sealed) -> None:
        """Keep a call of the agent with this word until next() takes it."""
        with self._changed:
            agent = self._agents.get(word)
            if agent is None:
                _hang_up(call)
                return
            agent.calls.append(call)
            if len(agent.calls) > _MOST_RETURN_CALLS:
                _hang_up(agent.calls.popleft())
            self._changed.notify_all()
        # Outside of the lock, because the agent's owner may ask for the call at once.
        agent.called()

    def next(self, word: bytes, timeout: float) -> Sealed | None:
        """Return the agent's newest call, waiting `timeout` seconds; close its older ones."""
        with self._changed:
            calls = self._agents[word].calls if word in self._agents else None
            if calls is None or not self._changed.wait_for(lambda: calls, timeout):
                return None
            newest = calls.pop()
            while calls:
                _hang_up(calls.pop())
            return newest

    def close(self) -> None:
        """Close the waiting calls."""
        with self._changed:
            for agent in self._agents.values():
                while agent.calls:
                    _hang_up(agent.calls.pop())
            self._agents.clear()


def _hang_up(call: Sealed) -> None:
    with contextlib.suppress(OSError):
        call.socket.close()


class CallListener:
    """Listens from the start until close(); calls `admit` with each caller, in threads.

    A caller checks the `certificate`, and only then sends `entry`, which lets it in. An agent that calls again sends its
    own word instead, and goes to `returns`. An empty `host` is every address.
    """

    def __init__(
        self,
        entry: str,
        certificate: Certificate,
        admit: Callable[[AgentCaller], None],
        limits: CallLimits | None = None,
        *,
        host: str = "",
        returns: ReturnCalls | None = None,
    ) -> None:
        self._returns = returns or ReturnCalls()
        self._entry = entry.encode("ascii")
        self._certificate = certificate
        self._admit = admit
        self._limits = limits or CallLimits()
        self._lock = threading.Lock()
        self._strangers: UnauthenticatedClients[_Stranger] = UnauthenticatedClients(self._limits.strangers)
        self._is_closed = False
        listeners = Listeners(host, 0)
        listeners.release_port()
        self._listener = listeners.sockets[host]
        self.port: int = listeners.port
        threading.Thread(target=self._listen, name="calls", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        # In this thread, because it takes 10 ms, in which the launcher starts.
        context = tls_context(self._certificate)
        while not self._is_closed:
            try:
                self._listener.settimeout(self._hang_up_on_late())
                sock, name = self._listener.accept()
            except TimeoutError:
                continue
            # The listener was closed, or the caller has hung up already.
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._make_room()
                continue
            stranger = _Stranger(sock, plain_address(name), time.monotonic() + self._limits.patience)
            with self._lock:
                if not self._strangers.is_welcome(stranger.address):
                    sock.close()
                    continue
                self._hang_up(self._strangers.enter(stranger, stranger.address))
            threading.Thread(target=self._meet, args=(stranger, context), daemon=True).start()

    def _make_room(self) -> None:
        with self._lock:
            self._hang_up(self._strangers.oldest())
        time.sleep(_PAUSE)

    def _hang_up_on_late(self) -> float | None:
        """Close late clients; return the seconds until the next deadline, None without clients."""
        with self._lock:
            while (first := self._strangers.first()) is not None:
                left = first.due - time.monotonic()
                if left > 0:
                    return left
                self._strangers.leave(first)
                self._hang_up(first)
        return None

    @staticmethod
    def _hang_up(stranger: _Stranger | None) -> None:
        if stranger is not None:
            # Its own thread sees the end, and closes the socket: closed here, the descriptor might be another's by then.
            with contextlib.suppress(OSError):
                stranger.socket.shutdown(socket.SHUT_RDWR)

    def _meet(self, stranger: _Stranger, context: "ssl.SSLContext") -> None:
        try:
            caller = self._check(stranger.socket, context)
            self._trust(stranger)
        except (OSError, ValueError):
            with self._lock:  # no agent of the job, or an agent that was quicker by another address
                self._strangers.leave(stranger)
                stranger.socket.close()
        else:
            if caller.word is None:
                self._admit(caller)
            else:
                self._returns.add(caller.word, caller.connection)

    def _trust(self, stranger: _Stranger) -> None:
        """Move the client's address to the trusted ones. Raises OSError if the client has been closed for being late."""
        with self._lock:
            if stranger not in self._strangers:
                raise OSError("it took too long")
            self._strangers.leave(stranger)
            # Other agents of this host are likely to call from the same address.
            self._strangers.know([stranger.address])

    def _check(self, sock: socket.socket, context: "ssl.SSLContext") -> AgentCaller:
        """Return the authenticated caller. Raises OSError and ValueError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)
        caller = Sealed(sock, context, server_side=True)
        caller.shake_hands()
        word = _part(caller, LONGEST_ENTRY)
        is_new = hmac.compare_digest(word, self._entry)
        if not is_new and not self._returns.knows(word):
            raise ValueError("a wrong word")
        hostname, environ = _facts(_part(caller, self._limits.facts))
        return AgentCaller(caller, hostname, environ, None if is_new else word)


def _part(caller: Sealed, most: int) -> bytes:
    """Read a length-prefixed part. Raises OSError, and ValueError beyond `most` bytes."""
    size = int.from_bytes(caller.receive(4), "big")
    if size > most:
        raise ValueError(f"{size} bytes; the limit is {most}")
    return caller.receive(size)


def _facts(data: bytes) -> tuple[str, dict[str, str]]:
    """Return hostname and environment of a caller. Raises ValueError."""
    try:
        facts = json.loads(data)
    except RecursionError:
        facts = None
    if not _FACTS(facts):
        raise ValueError("facts that no agent sends")
    hostname, environ = facts
    # Both may end in messages, so they must not control a terminal.
    return plain(hostname, _LONGEST), {name: plain(value, _LONGEST) for name, value in environ.items()}


class LauncherFailed(HvlaunchError):
    """The launcher ended too early, or started the wrong processes; its own messages are above.

    Try: the causes in docs/guides/troubleshooting.md#mpirun-srun-jsrun.
    """

    exit_code = EXIT_HOSTS


class Arrivals:
    """Waits for the first process of each of `hosts` (name and number of ranks, in order of rank), the host's agent."""

    def __init__(self, hosts: Sequence[tuple[str, int]], kind: Kind) -> None:
        self._kind = kind
        self._hosts: dict[int, tuple[str, int]] = {}
        """Name and number of ranks of a host, by its first rank."""
        rank = 0
        for name, count in hosts:
            self._hosts[rank] = name, count
            rank += count
        self._changed = threading.Condition()
        self._callers: dict[str, AgentCaller] = {}
        self._error: HvlaunchError | None = None

    def add(self, caller: AgentCaller) -> None:
        """Add a calling agent, or close its connection after an error.

        A second process with the same rank ends the job: either is an intruder with the entry word.
        """
        with self._changed:
            # A launcher may still start processes after the job has failed.
            if self._error is not None:
                caller.connection.socket.close()
                return
            try:
                host = self._host_of(caller)
            except HvlaunchError as error:
                caller.connection.socket.close()
                if not self.is_complete:
                    self._end(error)
            else:
                early = self._callers.setdefault(host, caller)
                if early is not caller:
                    self._doubt(early, caller)
            if self.is_complete or self._error is not None:
                self._changed.notify_all()

    def _doubt(self, early: AgentCaller, late: AgentCaller) -> None:
        ranks = ranks_of(self._kind, late.environ)
        self._error = LauncherFailed(
            f"two processes claim rank {ranks and ranks.rank}, {_place(early)} and {_place(late)}: one is not of this job, and knows HVLAUNCH_ENTRY",
            hint="ssh (--gloo), or a network of your own for the launcher (--network-interfaces)",
        )
        late.connection.socket.close()
        for caller in self._callers.values():
            with contextlib.suppress(OSError):
                caller.connection.socket.shutdown(
                    socket.SHUT_RDWR
                )  # its reader finds the reason in `trouble`

    @property
    def trouble(self) -> HvlaunchError | None:
        """The error behind the closed connections, if any."""
        with self._changed:
            return self._error

    def _host_of(self, caller: AgentCaller) -> str:
        """Return the name of the caller's host. Raises LauncherFailed if the caller is not a host's first rank."""
        # Launchers number their processes host by host unless told otherwise. A hostname says little: it may be an alias.
        ranks = ranks_of(self._kind, caller.environ)
        if ranks is None or ranks.local_rank is None:
            words = [
                word for names in names_of(self._kind) for word in (names.rank, names.local_rank) if word
            ]
            raise LauncherFailed(
                f"a process on {caller.hostname} has no rank: none of {', '.join(words)} is set there",
                hint="--mpirun PATH, if several MPIs are installed",
            )
        if ranks.rank not in self._hosts:
            raise LauncherFailed(
                f"{self._kind.value} did not number its processes host by host"
                f" (rank {ranks.rank} is the first on {caller.hostname})",
                hint="leave out flags that map or rank by node",
            )
        name, count = self._hosts[ranks.rank]
        # Flags for mapping, or a hostfile of the launcher's own, may overrule the number of processes.
        if ranks.local_size not in (None, count):
            raise LauncherFailed(
                f"{self._kind.value} started {ranks.local_size} processes on {caller.hostname}, not {count}",
                hint="one name for each host, and no flags that place processes",
            )
        shorts = {_short(name): name for name, _ in self._hosts.values()}
        actual = shorts.get(_short(caller.hostname), name)
        if actual != name:
            raise LauncherFailed(
                f"{self._kind.value} put the ranks of host {name} on host {actual}",
                hint="name the hosts in the launcher's own order",
            )
        return name

    def fail(self, error: HvlaunchError) -> None:
        """End the wait with this error, unless each agent has called."""
        with self._changed:
            if not self.is_complete and self._error is None:
                self._end(error)
                self._changed.notify_all()

    def _end(self, error: HvlaunchError) -> None:
        self._error = error
        for caller in self._callers.values():
            with contextlib.suppress(OSError):
                caller.connection.socket.close()

    def close(self) -> None:
        """Close the connections; their users must have finished."""
        with self._changed:
            self._end(self._error or LauncherFailed("the job has ended"))

    @property
    def is_complete(self) -> bool:
        return len(self._callers) == len(self._hosts)

    def agent_of(self, host: str, timeout: float) -> tuple[AgentCaller, int]:
        """Return the host's agent and number of ranks, after the last host's call.

        Raises StartTimeout after `timeout` seconds, and AgentFailed if an agent can no longer call.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: self.is_complete or self._error is not None, timeout)
            if self._error is not None:
                raise AgentFailed(self._error.cause, host=host, hint=self._error.hint)
            if not is_over:
                raise StartTimeout(
                    f"the agents of only {len(self._callers)} of {len(self._hosts)} hosts were connected within {timeout:g} s",
                    host=host,
                    hint="a longer --start-timeout",
                )
            return self._callers[host], dict(self._hosts.values())[host]


def _place(caller: AgentCaller) -> str:
    try:
        address = plain_address(caller.connection.socket.getpeername())
    # The connection is closed.
    except OSError:
        return f"on {caller.hostname}"
    return f"on {caller.hostname} ({address})"


def _short(name: str) -> str:
    return name.partition(".")[0]
