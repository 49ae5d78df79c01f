"""One end of a session: counts of sent and received frames, across connections. Pure."""

# A connection keeps the order of its frames, so frames carry no numbers: both ends count. When another connection
# replaces it, each end reports its count, and gets the frames behind this count again.

from __future__ import annotations

from hvlaunch.agent.quick import deque
from hvlaunch.agent.wire.frames import BadFrame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, List, Mapping, Sequence

__all__ = ["BY_AGENT", "BY_DRIVER", "LASTING", "SELDOM", "STREAMS", "Session", "StaleEpoch", "is_of_epoch"]

STREAMS = 2
LASTING, _OF_EPOCH = range(STREAMS)
BY_DRIVER: Mapping[str, int] = {
    **dict.fromkeys(("hello", "call", "probe", "start", "stop", "signal", "bye"), LASTING),
    **dict.fromkeys(("stdin", "relay", "ack", "errand"), _OF_EPOCH),
}
"""The stream of each numbered type of frame. The engine's orders are the lasting stream: a successor that replays the
engine sends the same orders with the same numbers. The other stream begins anew with each driver."""
BY_AGENT: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("hello", "reached", "probed", "started", "not_started", "output", "exited", "alone"),
            *("suspended", "master_port", "parting", "fault", "bye"),
        ),
        LASTING,
    ),
    **dict.fromkeys(("stdin_taken", "relay", "errand"), _OF_EPOCH),
}
SELDOM = 1 << 20
"""Bytes of received frames after which an acknowledgement is due."""


def is_of_epoch(kind: str) -> bool:
    """True for a type of the agent's frames that a successor must not get."""
    return BY_AGENT.get(kind) == _OF_EPOCH


class StaleEpoch(Exception):
    """A newer driver has taken over the session."""


class _Outbox:
    """Frames of a stream without acknowledgement, in order."""

    def __init__(self) -> None:
        self.sent = 0
        self.kept: Deque[Any] = deque()

    def taken(self, count: int) -> None:
        """Drop the first `count` frames of the stream: the other end has them. Raises BadFrame for an impossible count."""
        if not self.sent - len(self.kept) <= count <= self.sent:
            raise BadFrame("%d frames taken of %d" % (count, self.sent))
        for _ in range(count - (self.sent - len(self.kept))):
            self.kept.popleft()


class Session:
    """An end of a session. `sends` and `gets` are BY_DRIVER and BY_AGENT, or the reverse."""

    # Not thread-safe: received() and tell() belong to the reading thread, and the caller locks the kept frames.

    def __init__(self, sends: Mapping[str, int], gets: Mapping[str, int], epoch: int = 1) -> None:
        self._sends = sends
        self._gets = gets
        self._outboxes = [_Outbox() for _ in range(STREAMS)]
        self.have = [0] * STREAMS
        """Handled frames of each stream: the other end may drop these."""
        self.epoch = epoch
        """The driver's number: a successor has a higher number."""
        self._unsaid = 0

    def sending(self, kind: str, frame: Any) -> None:
        """Record a frame just before it is written; numbered frames are kept for another connection."""
        stream = self._sends.get(kind)
        if stream is not None:
            outbox = self._outboxes[stream]
            outbox.kept.append(frame)
            outbox.sent += 1

    def received(self, kind: str, size: int) -> bool:
        """Record a handled frame; return True, once, when an acknowledgement is due."""
        stream = self._gets.get(kind)
        if stream is None:
            return False
        self.have[stream] += 1
        self._unsaid += size
        # Not at each frame: acknowledgements would double the number of frames on the channel.
        return self._unsaid >= SELDOM > self._unsaid - size

    @property
    def kept(self) -> int:
        """Number of frames of the lasting stream without acknowledgement."""
        return len(self._outboxes[LASTING].kept)

    @property
    def has_news(self) -> bool:
        """True if frames were handled since the last acknowledgement."""
        return self._unsaid > 0

    def tell(self) -> List[int]:
        """Return the counts for an acknowledgement."""
        self._unsaid = 0
        return list(self.have)

    def taken(self, counts: Sequence[int]) -> None:
        """Apply an acknowledgement of the other end. Raises BadFrame for an impossible count."""
        for outbox, count in zip(self._outboxes, counts):  # noqa: B905 (Python 3.8 has no strict)
            outbox.taken(count)

    def again(self, counts: Sequence[int]) -> List[Any]:
        """Return the frames that the other end lacks, by its counts. Raises BadFrame."""
        self.taken(counts)
        return [frame for outbox in self._outboxes for frame in outbox.kept]

    def begin_epoch(self, epoch: int) -> bool:
        """Continue with a driver; return True for a successor. Raises StaleEpoch."""
        if epoch < self.epoch:
            raise StaleEpoch("epoch %d after %d" % (epoch, self.epoch))
        is_new = epoch > self.epoch
        if is_new:
            self.epoch = epoch
            self.have[_OF_EPOCH] = 0
            self._outboxes[_OF_EPOCH] = _Outbox()
        return is_new
