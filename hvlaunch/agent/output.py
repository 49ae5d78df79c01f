"""Output of the workers on this host: read from their pipes, and sent to the driver as far as its credit goes."""

from __future__ import annotations

import fcntl
import os

from hvlaunch.agent.quick import READ, Selector
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import FRAME_COST, LAST_OUTPUT, OUTPUT_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

    from hvlaunch.agent.wire.rejoin import Spill
    from hvlaunch.agent.worker import WorkerProcess

    Step = Tuple[int, float]

__all__ = ["WorkerOutput", "WorkerSlot"]

_F_GETPIPE_SZ = 1032  # fcntl(2); the module has the name since Python 3.10


class WorkerSlot:
    """A worker, and the agent's unfinished work for the worker; `about` is its name in frames: round, slot and start."""

    def __init__(self, about: Dict[str, int], worker: WorkerProcess, mark: str) -> None:
        self.about = about
        self.worker = worker
        self.mark = os.fsencode(mark)
        """NAME=VALUE in the environment of the worker, and usually of its children."""
        self.is_first = False
        """True for rank 0, which opens the store at MASTER_PORT."""
        self.master_port: Optional[int] = None
        self.may_be_alone: Optional[Sequence[str]] = None
        """The worker's command, if the worker may turn out to be a job of its own."""
        self.suspended_at: Optional[float] = None
        self.was_suspended = False
        self.steps: List[Step] = []
        self.end: Optional[Dict[str, Any]] = None
        self.is_reported = False
        """True once the driver has been sent the worker's end."""
        self.to_drain: Dict[str, int] = {}
        self.stdin_waiting = bytearray()
        self.stdin_ended = False


class WorkerOutput:
    """Sends the output of `slots`, the owner's list; at most `window` bytes are on their way at a time."""

    def __init__(
        self,
        slots: List[WorkerSlot],
        channel: DriverChannel,
        selector: Selector,
        window: int,
        scratch: str,
        spill: int,
    ) -> None:
        """At most `spill` bytes go into a file in the `scratch` directory while the connection is lost."""
        self._slots = slots
        self._channel = channel
        self._selector = selector
        self._window = self._credit = window
        self._scratch = scratch
        self._may_spill = spill
        self._spill: Optional[Spill] = None
        self._is_discarding = False

    @property
    def _may_read(self) -> bool:
        if self._spill is not None:
            return self._is_discarding or (self._channel.is_away and self._spill.has_room)
        return self._is_discarding or self._credit > 0 or (self._channel.is_away and self._may_spill > 0)

    def watch(self, slot: WorkerSlot) -> None:
        """Read the streams of a new worker."""
        for stream in slot.worker.output:
            self._watch_stream(slot, stream)

    def _watch_stream(self, slot: WorkerSlot, stream: str) -> None:
        if self._may_read:
            fd = slot.worker.output[stream]
            self._selector.register(fd, READ, lambda: self._read(slot, stream))

    def _read(self, slot: WorkerSlot, stream: str, *, is_last: bool = False) -> int:
        """Pass one chunk on and return its size, 0 if the pipe is empty or closed. The last output needs no credit."""
        fd = slot.worker.output.get(stream)
        if fd is None or not (self._may_read or is_last):
            return 0
        try:
            data = os.read(fd, OUTPUT_CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            if fd in self._selector:
                self._selector.unregister(fd)
            os.close(fd)
            del slot.worker.output[stream]
        if not self._is_discarding:
            self._pass_on({"type": "output", "stream": stream, **slot.about}, data)
            if not self._may_read:
                self._pause()
        return len(data)

    def finish(self, slot: WorkerSlot) -> None:
        """Read the pipes of an ended worker, then send its end."""
        # Descendants may hold the pipes open and print for ever, so no more is read than the pipes can hold now, and
        # the end of each stream behind it.
        for stream, fd in slot.worker.output.items():
            slot.to_drain[stream] = min(fcntl.fcntl(fd, _F_GETPIPE_SZ), LAST_OUTPUT) + 1
        for stream in list(slot.worker.output):
            while slot.to_drain[stream] > 0:
                size = self._read(slot, stream, is_last=True)
                slot.to_drain[stream] = slot.to_drain[stream] - size if size else 0
        # The end waits for no credit: other workers' ends may depend on it, and the driver's reader may be stuck.
        if not slot.is_reported and slot.end is not None:
            slot.is_reported = True
            error = "" if slot.end["code"] == 0 else slot.worker.error_text()
            self._pass_on({"type": "exited", **slot.about, **slot.end}, error.encode())

    def _pass_on(self, header: Dict[str, Any], body: bytes) -> None:
        """Send a worker's output or end, or append the frame to the file."""
        if self._spill is None and self._credit <= 0 and self._channel.is_away and self._may_spill:
            from hvlaunch.agent.wire.rejoin import Spill  # noqa: PLC0415 (few connections are lost for long)

            self._spill = Spill(self._scratch, self._may_spill)
        if self._spill is not None:
            self._spill.put(header, body)
            return
        self._channel.send(header, body)
        if body and header["type"] == "output":
            self._credit -= len(body) + FRAME_COST

    def _send_spilled(self, *, is_final: bool = False) -> None:
        """Send frames from the file; final frames, and frames before a worker's end, need no credit."""
        while self._spill is not None and (self._credit > 0 or is_final or self._spill.has_end):
            header, body = self._spill.take()
            if self._spill.is_empty:
                self._spill.close()
                self._spill = None
            self._channel.send(header, body)
            if header["type"] == "output":
                self._credit -= len(body) + FRAME_COST if body else 0

    def resume(self, *, with_new_driver: bool) -> None:
        """Continue over another connection; a new driver grants the whole window anew."""
        if with_new_driver:
            self._credit = self._window
        self._send_spilled()
        if not self._may_read:
            self._pause()

    def _pause(self) -> None:
        """Stop reading for want of credit."""
        # The workers then block in write(), as on any full pipe: that is the only way to slow them down.
        for slot in self._slots:
            for fd in slot.worker.output.values():
                if fd in self._selector:
                    self._selector.unregister(fd)

    def add_credit(self, size: int) -> None:
        """Let the workers print this many bytes more."""
        could_read = self._may_read
        self._credit += size
        self._send_spilled()
        if not could_read and self._may_read:
            self.read_on()

    def read_on(self) -> None:
        """Read each stream with permission to read now."""
        for slot in list(self._slots):
            for stream in list(slot.worker.output):
                if self._may_read and slot.worker.output[stream] not in self._selector:
                    self._watch_stream(slot, stream)

    def discard(self) -> None:
        """Read and drop further output, without a driver to send to."""
        # Unread pipes would block workers in write(), and a blocked worker may not react to SIGTERM.
        self._is_discarding = True
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self.read_on()

    def finish_all(self) -> None:
        """Send the remaining output, after the death of each writing process."""
        for slot in self._slots:
            self.finish(slot)
        self._send_spilled(is_final=True)
