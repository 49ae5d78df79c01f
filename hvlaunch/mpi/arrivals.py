"""Calls of the agents, until each host has an agent."""

import contextlib
import socket
import threading
from collections.abc import Sequence

from hvlaunch.errors import EXIT_HOSTS, AgentFailed, HvlaunchError, StartTimeout
from hvlaunch.mpi import Kind
from hvlaunch.mpi.call_listener import AgentCaller
from hvlaunch.mpi.process_ranks import names_of, ranks_of
from hvlaunch.rendezvous.serving.traffic import plain_address

__all__ = ["Arrivals", "LauncherFailed"]


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
