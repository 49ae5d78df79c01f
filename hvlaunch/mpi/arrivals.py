"""The agents that have come, until all are there: then it is known which of them are whose host's."""

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence

from hvlaunch.errors import AgentFailed, HvlaunchError, StartTimeout
from hvlaunch.mpi.call_listener import Caller
from hvlaunch.mpi.detect import Kind
from hvlaunch.mpi.launcher_errors import LauncherFailed
from hvlaunch.mpi.process_ranks import names_of, ranks_of
from hvlaunch.rendezvous.serving.traffic import plain_address

__all__ = ["Arrivals", "sort_out"]


class Arrivals:
    """Waits for as many agents as there are places in `hosts` (name and number of ranks, in order of rank)."""

    def __init__(self, hosts: Sequence[tuple[str, int]], kind: Kind) -> None:
        self._hosts = hosts
        self._size = sum(count for _, count in hosts)
        self._kind = kind
        self._changed = threading.Condition()
        self._callers: list[Caller] = []
        self._sorted: Mapping[str, Sequence[Caller]] | None = None
        self._error: HvlaunchError | None = None

    def add(self, caller: Caller) -> None:
        """One has come. After the end it is sent away.

        The second of a rank that has come ends all: one of the two is a stranger, who knows the word that lets agents in.
        """
        with self._changed:
            if self._error is None and self._sorted is not None:
                self._doubt(caller)
            if self._error is not None or self._sorted is not None:
                caller.connection.socket.close()
                return
            self._callers.append(caller)
            if len(self._callers) == self._size:
                try:
                    self._sorted = sort_out(self._callers, self._hosts, self._kind)
                except HvlaunchError as error:
                    self._end(error)
                self._changed.notify_all()

    def _doubt(self, late: Caller) -> None:
        who = ranks_of(self._kind, late.environ)
        by_rank = {_rank(caller, self._kind): caller for caller in self._callers}
        early = None if who is None else by_rank.get(who.rank)
        if who is None or early is None:
            return
        self._error = LauncherFailed(
            f"two processes came as rank {who.rank}, {_place(early)} and {_place(late)}: one of them is a stranger, who knows HVLAUNCH_ENTRY",
            hint="ssh (--gloo), or a network of your own for the launcher (--network-interfaces)",
        )
        for caller in self._callers:
            with contextlib.suppress(OSError):
                caller.connection.socket.shutdown(
                    socket.SHUT_RDWR
                )  # who reads from it finds why in `trouble`
        self._changed.notify_all()

    @property
    def trouble(self) -> HvlaunchError | None:
        """Why all were hung up on, if they were."""
        with self._changed:
            return self._error

    def fail(self, error: HvlaunchError) -> None:
        """Not all will come."""
        with self._changed:
            if self._sorted is None and self._error is None:
                self._end(error)
                self._changed.notify_all()

    def _end(self, error: HvlaunchError) -> None:
        self._error = error
        for caller in self._callers:
            with contextlib.suppress(OSError):
                caller.connection.socket.close()

    def close(self) -> None:
        """Hang up on all, after those who speak with them have done so."""
        with self._changed:
            self._end(self._error or LauncherFailed("the job has ended"))

    @property
    def is_complete(self) -> bool:
        with self._changed:
            return self._sorted is not None

    def of(self, host: str, timeout: float) -> Sequence[Caller]:
        """The host's agents in order of rank, once all agents have come.

        Raises StartTimeout after so many seconds, AgentFailed where not all will come.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._sorted is not None or self._error is not None, timeout
            )
            if self._error is not None:
                raise AgentFailed(self._error.cause, host=host, hint=self._error.hint)
            if not done or self._sorted is None:
                raise StartTimeout(
                    f"only {len(self._callers)} of {self._size} processes were connected within {timeout:g} s",
                    host=host,
                    hint="a longer --start-timeout",
                )
            return self._sorted[host]


def sort_out(
    callers: Sequence[Caller], hosts: Sequence[tuple[str, int]], kind: Kind
) -> dict[str, list[Caller]]:
    """Whose agents the callers are: each host's, in order of rank.

    Raises LauncherFailed where the launcher tells no ranks, where they are not 0 to size - 1, and where
    they do not go host by host.
    """
    by_rank: dict[int, Caller] = {}
    for caller in callers:
        who = ranks_of(kind, caller.environ)
        if who is None:
            names = ", ".join(names.rank for names in names_of(kind))
            raise LauncherFailed(
                f"a process on {caller.hostname} has no rank: none of {names} is set there",
                hint="--mpirun PATH, if several MPIs are installed",
            )
        if who.rank in by_rank or who.rank >= len(callers):
            whom = "two" if who.rank in by_rank else "one"
            raise LauncherFailed(
                f"{kind.value} started {len(callers)} processes, and gave rank {who.rank} to {whom} of them"
            )
        by_rank[who.rank] = caller
    return _by_host([by_rank[rank] for rank in range(len(callers))], hosts, kind)


def _by_host(
    ranked: Sequence[Caller], hosts: Sequence[tuple[str, int]], kind: Kind
) -> dict[str, list[Caller]]:
    """Launchers number their processes host by host unless told otherwise; the names may be aliases."""
    found: dict[str, list[Caller]] = {}
    rank = 0
    for name, count in hosts:
        found[name] = list(ranked[rank : rank + count])
        rank += count
    homes = [{caller.hostname for caller in callers} for callers in found.values()]
    if any(len(names) > 1 for names in homes):
        order = ", ".join(f"{rank} on {caller.hostname}" for rank, caller in enumerate(ranked[:16]))
        raise LauncherFailed(
            f"{kind.value} did not number its processes host by host ({order})",
            hint="leave out flags that map or rank by node",
        )
    shorts = {_short(name): name for name, _ in hosts}
    for name, callers in found.items():
        actual = shorts.get(_short(callers[0].hostname), name)
        if actual != name:
            raise LauncherFailed(
                f"{kind.value} put the ranks of host {name} on host {actual}",
                hint="name the hosts in the launcher's own order",
            )
    return found


def _rank(caller: Caller, kind: Kind) -> int | None:
    who = ranks_of(kind, caller.environ)
    return None if who is None else who.rank


def _place(caller: Caller) -> str:
    try:
        address = plain_address(caller.connection.socket.getpeername())
    except OSError:  # it has gone
        return f"on {caller.hostname}"
    return f"on {caller.hostname} ({address})"


def _short(name: str) -> str:
    return name.partition(".")[0]
