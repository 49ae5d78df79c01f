"""What connections to a job's hosts wait for, begun before the job asks for them: settings, and TCP connections.

A driver takes 50 ms from its command line to its first connection. Meanwhile ssh tells the hosts' settings, and the
hosts' sshd start.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.ssh.config import HostSettings
from hvlaunch.ssh.tcp import Dialed

__all__ = ["Early", "EarlyStarts"]


class Early(NamedTuple):
    """The early part of a connection to a host."""

    settings: HostSettings
    dialed: Dialed | None


class EarlyStarts:
    """Resolves and dials hosts in a thread, for one later connection each. Thread-safe.

    Errors are left to the host's connection, which meets them again. `is_same_for_all` is asked after the first host: if
    each host costs a question to ssh, the others are left to their own threads.
    """

    def __init__(
        self,
        resolve: Callable[[Host], HostSettings],
        is_same_for_all: Callable[[], bool],
        dial: Callable[[HostSettings], Dialed | None] = lambda _settings: None,
    ) -> None:
        self._resolve = resolve
        self._is_same_for_all = is_same_for_all
        self._dial = dial
        self._changed = threading.Condition()
        self._ready: dict[Host, Early] = {}
        self._taken: set[Host] = set()
        self._at_work: Host | None = None
        self._is_closed = False

    def begin(self, hosts: Iterable[Host]) -> None:
        """Begin with these hosts, in order. Does not block."""
        threading.Thread(target=self._run, args=(tuple(hosts),), name="early", daemon=True).start()

    def hand_over(self, host: Host) -> Early | None:
        """Return what is ready for the host, at most once; waits if the thread is at work on this host."""
        with self._changed:
            self._taken.add(host)
            self._changed.wait_for(lambda: self._at_work != host)
            return self._ready.pop(host, None)

    def close(self) -> None:
        """Close the connections that nobody has taken. May be repeated."""
        with self._changed:
            self._is_closed = True
            for early in self._ready.values():
                _close(early)
            self._ready.clear()

    def _run(self, hosts: Sequence[Host]) -> None:
        dialed: set[tuple[str, int]] = set()
        for host in hosts:
            with self._changed:
                if self._is_closed:
                    return
                if host in self._taken:
                    continue
                self._at_work = host
            early: Early | None = None
            try:
                # The host's own thread meets and reports an error.
                with suppress(HostError, OSError, UnicodeError):
                    settings = self._resolve(host)
                    address = settings.hostname, settings.port
                    early = Early(settings, None)
                    # One for each address: sshd's MaxStartups and --connect-limit count connections.
                    if address not in dialed:
                        dialed.add(address)
                        early = Early(settings, self._dial(settings))
            finally:
                with self._changed:
                    if early is not None and not self._is_closed:
                        self._ready[host] = early
                    elif early is not None:
                        _close(early)
                    self._at_work = None
                    self._changed.notify_all()
            if not self._is_same_for_all():
                return


def _close(early: Early) -> None:
    if early.dialed is not None:
        early.dialed.sock.close()
