"""When agents are to hear from the driver, and which of them were silent for too long. Pure."""

from collections.abc import Mapping

__all__ = ["Lease"]

_LONGEST_PULSE = 5.0
_PULSES_PER_LEASE = 4


class Lease:
    """Silence of `seconds` ends it. Times are seconds of the driver's clock; `deadline` is when look() is to be called."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._pulse = min(_LONGEST_PULSE, seconds / _PULSES_PER_LEASE)
        self._next_pulse = self._awake_since = now
        self.deadline = now

    def look(self, heard: Mapping[str, float], now: float) -> tuple[bool, list[str]]:
        """Whether to send all hosts a sign of life, and which were silent for the lease; `heard` is when each was last heard."""
        if now > self._next_pulse + self._pulse:
            self._awake_since = now  # we were stopped ourselves: what the hosts sent is still to be read
        is_due = now >= self._next_pulse
        if is_due:
            self._next_pulse = now + self._pulse
        ends = {host: max(when, self._awake_since) + self._seconds for host, when in heard.items()}
        self.deadline = min([self._next_pulse, *(end for end in ends.values() if end > now)])
        return is_due, [host for host, end in ends.items() if end <= now]
