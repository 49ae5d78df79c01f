"""The agents that have come, one from each host, until all are there."""

import contextlib
import socket
import threading
from collections.abc import Sequence

from hvlaunch.errors import AgentFailed, HvlaunchError, StartTimeout
from hvlaunch.mpi.call_listener import Caller
from hvlaunch.mpi.detect import Kind
from hvlaunch.mpi.launcher_errors import LauncherFailed
from hvlaunch.mpi.process_ranks import names_of, ranks_of
from hvlaunch.rendezvous.serving.traffic import plain_address

__all__ = ["Arrivals"]


class Arrivals:
    """Waits for an agent from each of `hosts` (name and number of ranks, in order of rank): the host's first process."""

    def __init__(self, hosts: Sequence[tuple[str, int]], kind: Kind) -> None:
        self._kind = kind
        self._hosts: dict[int, tuple[str, int]] = {}
        """Name and number of ranks, by the first of them."""
        rank = 0
        for name, count in hosts:
            self._hosts[rank] = name, count
            rank += count
        self._changed = threading.Condition()
        self._callers: dict[str, Caller] = {}
        self._error: HvlaunchError | None = None

    def add(self, caller: Caller) -> None:
        """One has come. After the end it is sent away.

        The second of a rank that has come ends all: one of the two is a stranger, who knows the word that lets agents in.
        """
        with self._changed:
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

    def _doubt(self, early: Caller, late: Caller) -> None:
        who = ranks_of(self._kind, late.environ)
        self._error = LauncherFailed(
            f"two processes came as rank {who and who.rank}, {_place(early)} and {_place(late)}: one of them is a stranger, who knows HVLAUNCH_ENTRY",
            hint="ssh (--gloo), or a network of your own for the launcher (--network-interfaces)",
        )
        late.connection.socket.close()
        for caller in self._callers.values():
            with contextlib.suppress(OSError):
                caller.connection.socket.shutdown(socket.SHUT_RDWR)  # who reads finds why in `trouble`

    @property
    def trouble(self) -> HvlaunchError | None:
        """Why all were hung up on, if they were."""
        with self._changed:
            return self._error

    def _host_of(self, caller: Caller) -> str:
        """The name of its host. Raises LauncherFailed where it is not its host's first rank.

        Launchers number their processes host by host unless told otherwise; the names may be aliases.
        """
        who = ranks_of(self._kind, caller.environ)
        if who is None or who.local_rank is None:
            words = [
                word for names in names_of(self._kind) for word in (names.rank, names.local_rank) if word
            ]
            raise LauncherFailed(
                f"a process on {caller.hostname} has no rank: none of {', '.join(words)} is set there",
                hint="--mpirun PATH, if several MPIs are installed",
            )
        if who.rank not in self._hosts:
            raise LauncherFailed(
                f"{self._kind.value} did not number its processes host by host"
                f" (rank {who.rank} is the first on {caller.hostname})",
                hint="leave out flags that map or rank by node",
            )
        name, count = self._hosts[who.rank]
        if who.local_size not in (None, count):
            raise LauncherFailed(
                f"{self._kind.value} started {who.local_size} processes on {caller.hostname}, not {count}",
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
        """Not all will come."""
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
        """Hang up on all, after those who speak with them have done so."""
        with self._changed:
            self._end(self._error or LauncherFailed("the job has ended"))

    @property
    def is_complete(self) -> bool:
        return len(self._callers) == len(self._hosts)

    def of(self, host: str, timeout: float) -> tuple[Caller, int]:
        """The host's agent, and its number of ranks, once the agents of all hosts have come.

        Raises StartTimeout after so many seconds, AgentFailed where not all will come.
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


def _place(caller: Caller) -> str:
    try:
        address = plain_address(caller.connection.socket.getpeername())
    except OSError:  # it has gone
        return f"on {caller.hostname}"
    return f"on {caller.hostname} ({address})"


def _short(name: str) -> str:
    return name.partition(".")[0]
