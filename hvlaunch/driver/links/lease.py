"""The lease: when to ping agents, and which hosts were silent for too long. Pure."""

from collections.abc import Callable, Mapping
from math import inf

from hvlaunch.job import RECONNECT_TIMEOUT, JobSpec

__all__ = ["Lease", "agents_lease", "patience_alone"]

_LONGEST_PULSE = 5.0
_PULSES_PER_LEASE = 4
_RESENT = 1.0
"""Seconds between two of TCP's attempts (ssh/streams/tcp.py): data sent during a cut arrives up to this much late."""
_MOST_LATE = 2 * _PULSES_PER_LEASE
"""How often the driver's own delay excuses a silent host: after so many turns its answer would have been read."""


def agents_lease(seconds: float) -> float:
    """Return the silence after which an agent gives up, for a lease of `seconds`."""
    # The last ping may have arrived a pulse before a cut as long as the lease.
    return seconds + _pulse(seconds) + _RESENT


def patience_alone(spec: JobSpec) -> float | None:
    """Return the seconds that agents wait for a driver without a possible successor; None for no change.

    With --detach agents otherwise wait for a successor as long as the lease, unless the user has set a time.
    """
    waits_for_another = spec.detach != "never" and spec.reconnect_timeout == spec.lease
    return min(RECONNECT_TIMEOUT, spec.lease) if waits_for_another else None


class Lease:
    """Ends for a host without an answer to a ping for `seconds`, plus a second for TCP's next attempt.

    Times are seconds of the driver's clock; check() must be called at `deadline`. `pulse` is the longest time between two
    pings.
    """

    def __init__(self, seconds: float, now: float, *, pulse: float = inf) -> None:
        self._seconds = seconds
        self._pulse = min(_pulse(seconds), pulse)
        self._next_pulse = now
        self._silences: dict[str, _Silence] = {}
        self.deadline = now
        self.doubtful: list[str] = []
        """Hosts without an answer for half the lease: another connection may reach them."""
        self.quiet: set[str] = set()
        """Hosts without an answer to the last ping when the next was due."""
        self.silent: dict[str, float] = {}
        """Hosts with an unanswered ping, and the start of their silence."""

    def check(
        self, heard: Mapping[str, float], acknowledged: Callable[[str], float | None], now: float
    ) -> tuple[bool, list[str]]:
        """Return True if a ping is due, and the hosts that have been silent for the lease.

        `heard` has the time of each host's last bytes; `acknowledged` returns when its kernel last acknowledged data, None if
        unknown.
        """
        # A late call means that this process was stopped: the hosts' answers may wait unread.
        is_late = now > self._next_pulse + self._pulse
        is_due = now >= self._next_pulse
        if is_due:
            self._next_pulse = now + self._pulse
        before = self._silences
        self._silences = {
            host: before[host] if host in before and before[host].heard == when else _Silence(when, when)
            for host, when in heard.items()
        }
        ends: dict[str, float] = {}
        for host, silence in self._silences.items():
            if silence.asked < inf:
                silence.note_acknowledged(acknowledged(host), self._seconds)
                if is_late:
                    silence.excuse(now)
            elif is_due:
                silence.asked = silence.since = now
            ends[host] = silence.ends_at(self._seconds)
        self.doubtful = [
            host for host, silence in self._silences.items() if now >= silence.since + self._seconds / 2
        ]
        self.silent = {host: silence.since for host, silence in self._silences.items() if silence.since < inf}
        if is_due:
            self.quiet = {host for host, silence in self._silences.items() if now > silence.since}
        self.deadline = min([self._next_pulse, *(end for end in ends.values() if end > now)])
        return is_due, [host for host, end in ends.items() if end <= now]


class _Silence:
    """Silence of a host: its start, and the time of the first unanswered ping."""

    # After a cut, the host's own data is sent again by its sshd's TCP, with doubling pauses: the pause in which a cut heals
    # may last as long as the cut. The host's kernel acknowledges earlier than that, and earns the host more time.
    def __init__(self, heard: float, acknowledged: float) -> None:
        self.heard = heard
        self.acknowledged = acknowledged
        self.asked = self.since = inf
        """`asked` is the time of the first unanswered ping; `since` is later if the driver itself was late."""
        self.until = 0.0
        self._excused = 0

    def note_acknowledged(self, acknowledged: float | None, seconds: float) -> None:
        """Note the newest acknowledgement of the host's kernel; after a long cut the host gets more time."""
        if acknowledged is not None and acknowledged > self.acknowledged:
            cut = acknowledged - self.acknowledged
            # A shorter cut leaves enough of the lease for TCP's longest pause.
            if cut > seconds / 2:
                self.until = min(acknowledged + cut, self.asked + 2 * seconds)
            self.acknowledged = acknowledged

    def excuse(self, now: float) -> None:
        """Restart the silence: the driver itself could not read answers until now."""
        if self._excused < _MOST_LATE:
            self._excused += 1
            self.since = now

    def ends_at(self, seconds: float) -> float:
        """Return the time at which the host is given up."""
        return max(self.since + seconds, self.until) + _RESENT


def _pulse(seconds: float) -> float:
    return min(_LONGEST_PULSE, seconds / _PULSES_PER_LEASE)
