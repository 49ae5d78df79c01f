"""When agents are to hear from the driver, and which of them were silent for too long. Pure."""

from collections.abc import Callable, Mapping
from math import inf

from hvlaunch.job import RECONNECT_TIMEOUT, JobSpec

__all__ = ["Lease", "agents_lease", "patience_alone"]

_LONGEST_PULSE = 5.0
_PULSES_PER_LEASE = 4
_RESENT = 1.0
"""Seconds between two of TCP's attempts (see streams/tcp.py in ssh): what was sent in a cut arrives that long after it."""
_MOST_LATE = 2 * _PULSES_PER_LEASE
"""How often in one silence of a host the driver may be late itself before that excuses the host no more: it had as many turns to read its answer."""


def agents_lease(seconds: float) -> float:
    """The silence after which an agent gives up: the last sign of life may have come a pulse before a cut of `seconds`."""
    return seconds + _pulse(seconds) + _RESENT


def patience_alone(spec: JobSpec) -> float | None:
    """Seconds for which agents are to wait for the driver where no other can take the job over.

    None: no less than otherwise. With --detach they wait for another as long as the lease, unless the user says for how long.
    """
    waits_for_another = spec.detach != "never" and spec.reconnect_timeout == spec.lease
    return min(RECONNECT_TIMEOUT, spec.lease) if waits_for_another else None


class Lease:
    """Ends when a host has not answered a sign of life for `seconds`, and the second in which TCP tries again.

    Times are seconds of the driver's clock; `deadline` is when look() is to be called. `pulse` is the longest time between two pings.
    """

    def __init__(self, seconds: float, now: float, *, pulse: float = inf) -> None:
        self._seconds = seconds
        self._pulse = min(_pulse(seconds), pulse)
        self._next_pulse = now
        self._silences: dict[str, _Silence] = {}
        self.deadline = now
        self.doubtful: list[str] = []
        """Hosts that have not answered for half the time, when it was looked: another connection may reach them."""
        self.quiet: set[str] = set()
        """Hosts that had not answered when the next ping was due."""

    def look(
        self, heard: Mapping[str, float], acknowledged: Callable[[str], float | None], now: float
    ) -> tuple[bool, list[str]]:
        """Whether to send all hosts a sign of life, and which have not answered for the lease.

        `heard` is when each was last heard, `acknowledged` when its kernel last acknowledged something; None if not known.
        """
        # Late, we were stopped ourselves: what the hosts sent is still to be read.
        is_late = now > self._next_pulse + self._pulse
        is_due = now >= self._next_pulse
        if is_due:
            self._next_pulse = now + self._pulse
        known = self._silences
        self._silences = {
            host: known[host] if host in known and known[host].heard == when else _Silence(when, when)
            for host, when in heard.items()
        }
        ends: dict[str, float] = {}
        for host, silence in self._silences.items():
            if silence.asked < inf:
                silence.see(acknowledged(host), self._seconds)
                if is_late:
                    silence.excuse(now)
            elif is_due:
                silence.asked = silence.since = now
            ends[host] = silence.end(self._seconds)
        self.doubtful = [
            host for host, silence in self._silences.items() if now >= silence.since + self._seconds / 2
        ]
        if is_due:
            self.quiet = {host for host, silence in self._silences.items() if now > silence.since}
        self.deadline = min([self._next_pulse, *(end for end in ends.values() if end > now)])
        return is_due, [host for host, end in ends.items() if end <= now]


class _Silence:
    """Of one host: since when, and when it was first sent a sign of life that it has not answered.

    What the host itself has sent in a cut is sent again by its sshd's TCP, whose pauses double. So the pause in which
    a cut heals may go on for as long as the cut was. That it has healed is seen before: the host acknowledges again.
    """

    def __init__(self, heard: float, acknowledged: float) -> None:
        self.heard = heard
        self.acknowledged = acknowledged
        self.asked = self.since = inf
        """`since` counts, and is later than `asked` where the driver was late."""
        self.until = 0.0
        self._excused = 0

    def see(self, acknowledged: float | None, seconds: float) -> None:
        """Its kernel's newest sign of life; only a cut of more than half the lease has later consequences."""
        if acknowledged is not None and acknowledged > self.acknowledged:
            cut = acknowledged - self.acknowledged
            if cut > seconds / 2:
                self.until = min(acknowledged + cut, self.asked + 2 * seconds)
            self.acknowledged = acknowledged

    def excuse(self, now: float) -> None:
        """The driver could not have heard it until now."""
        if self._excused < _MOST_LATE:
            self._excused += 1
            self.since = now

    def end(self, seconds: float) -> float:
        """When the host is given up."""
        return max(self.since + seconds, self.until) + _RESENT


def _pulse(seconds: float) -> float:
    return min(_LONGEST_PULSE, seconds / _PULSES_PER_LEASE)
