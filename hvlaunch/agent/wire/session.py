"""What one end of a session has sent and received, whichever connections carry it. Pure."""

# A connection keeps the order of its frames, so numbers are not sent with them: both ends count. When another connection
# takes its place, each end says how many frames it has, and gets all that follow once more.

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
"""The stream of each type of frame that is numbered. What the engine orders has one of its own: a driver that replays the
engine makes it again, with the same numbers. The other begins anew with each driver."""
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
"""Bytes of frames, after which the other end is told that it need not keep them."""


def is_of_epoch(kind: str) -> bool:
    """Whether an agent's frame is for one driver alone."""
    return BY_AGENT.get(kind) == _OF_EPOCH


class StaleEpoch(Exception):
    """Another driver has taken the session over."""


class _Outbox:
    """The frames of one stream that the other end may lack, in order."""

    def __init__(self) -> None:
        self.sent = 0
        self.kept: Deque[Any] = deque()

    def taken(self, count: int) -> None:
        """The other end has the first `count`. Raises BadFrame where that can't be."""
        if not self.sent - len(self.kept) <= count <= self.sent:
            raise BadFrame("%d frames taken of %d" % (count, self.sent))
        for _ in range(count - (self.sent - len(self.kept))):
            self.kept.popleft()


class Session:
    """One end. `sends` and `gets` are BY_DRIVER and BY_AGENT, or the other way round."""

    # received() and tell() are for who reads; what is kept is the caller's to lock.

    def __init__(self, sends: Mapping[str, int], gets: Mapping[str, int], epoch: int = 1) -> None:
        self._sends = sends
        self._gets = gets
        self._outboxes = [_Outbox() for _ in range(STREAMS)]
        self.have = [0] * STREAMS
        """How many frames of each stream have come, and were dealt with: what the other end need not keep."""
        self.epoch = epoch
        """The driver's number: each driver that takes the session over has a higher one."""
        self._unsaid = 0

    def sending(self, kind: str, frame: Any) -> None:
        """The frame goes out now: keep it where it is numbered."""
        stream = self._sends.get(kind)
        if stream is not None:
            outbox = self._outboxes[stream]
            outbox.kept.append(frame)
            outbox.sent += 1

    def received(self, kind: str, size: int) -> bool:
        """A frame of so many bytes was dealt with; whether it is time to tell the other end, which is said once."""
        stream = self._gets.get(kind)
        if stream is None:
            return False
        self.have[stream] += 1
        self._unsaid += size
        return self._unsaid >= SELDOM > self._unsaid - size

    @property
    def kept(self) -> int:
        """How many frames of the lasting stream the other end may lack."""
        return len(self._outboxes[LASTING].kept)

    @property
    def has_news(self) -> bool:
        """Whether the other end does not know yet what we have."""
        return self._unsaid > 0

    def tell(self) -> List[int]:
        """What to tell the other end that we have."""
        self._unsaid = 0
        return list(self.have)

    def taken(self, counts: Sequence[int]) -> None:
        """The other end has so many frames of each stream. Raises BadFrame where that can't be."""
        for outbox, count in zip(self._outboxes, counts):  # noqa: B905 (Python 3.8 has no strict)
            outbox.taken(count)

    def again(self, counts: Sequence[int]) -> List[Any]:
        """The frames that the other end lacks, which has so many. Raises BadFrame."""
        self.taken(counts)
        return [frame for outbox in self._outboxes for frame in outbox.kept]

    def begin_epoch(self, epoch: int) -> bool:
        """A driver takes the session up; whether it is another than before. Raises StaleEpoch."""
        if epoch < self.epoch:
            raise StaleEpoch("epoch %d after %d" % (epoch, self.epoch))
        is_new = epoch > self.epoch
        if is_new:
            self.epoch = epoch
            self.have[_OF_EPOCH] = 0
            self._outboxes[_OF_EPOCH] = _Outbox()
        return is_new
