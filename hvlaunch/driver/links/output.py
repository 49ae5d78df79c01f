"""The output of one host's workers on its way from the link to the printer, and the credit that comes back."""

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from hvlaunch.agent.wire.frames import FRAME_COST, BadFrame
from hvlaunch.console.lines import Stream

if TYPE_CHECKING:
    from hvlaunch.console.recent import Origin
    from hvlaunch.driver.record.frame_record import FrameNumbers, FrameRecord
    from hvlaunch.driver.result_files import ResultFiles

__all__ = ["HostOutput", "OutputPrinter"]


class OutputPrinter(Protocol):
    """The printer, as links use it.

    `origin` names the link and the frame; the printer skips output whose origin it has printed before. `note` is called
    before printing, as in Output; `done` is called after printing, with the number of bytes.
    """

    def output(
        self,
        rank: int,
        stream: Stream,
        data: bytes,
        done: Callable[[int], None],
        origin: "Origin",
        note: Callable[[bool], None] | None,
    ) -> None: ...

    def end_stream(
        self, rank: int, stream: Stream, done: Callable[[int], None], origin: "Origin"
    ) -> None: ...

    def tail(self, rank: int) -> bytes:
        """Return the last bytes of the rank's stderr."""


class Credit:
    """Credit for processed output, sent to the agent in large portions. For any thread; `give` sends credit."""

    # Portions, since a frame for each line would double the number of writes.

    def __init__(self, window: int, give: Callable[[int], None]) -> None:
        self._portion = window // 4
        self._give = give
        self._lock = Lock()
        self._due = 0

    def add(self, size: int) -> None:
        """Count a processed frame with `size` bytes of output."""
        with self._lock:
            self._due += size + FRAME_COST
            if self._due >= self._portion:
                self._give(self._due)
                self._due = 0


class HostOutput:
    """Passes the output of one host's workers to the printer, in the link's thread. The printer's thread calls back.

    `rank_of` returns a worker's rank by slot and start. `send_credit` grants the agent further bytes, `acknowledge` marks
    a frame as acked. `frame_record` records printed frames; without it nothing outlives this driver.
    """

    def __init__(
        self,
        number: int,
        window: int,
        printer: OutputPrinter,
        results: "ResultFiles | None",
        frame_record: "FrameRecord | None",
        rank_of: Callable[[int, int], int | None],
        send_credit: Callable[[int], None],
        acknowledge: Callable[[int], None],
    ) -> None:
        self._number = number
        self._printer = printer
        self._results = results
        self._frame_record = frame_record
        self._rank_of = rank_of
        self._acknowledge = acknowledge
        self._credit = Credit(window, send_credit)
        self._printed_before: Mapping[Stream, int] = {}
        """The last frames that a killed driver has printed."""
        self.last_output: dict[int, float] = {}
        """When each rank has printed last."""

    def skip_printed(self, record: "FrameNumbers") -> None:
        """Skip the output that a killed driver has printed without telling its agent."""
        self._printed_before = {"stdout": record.stdout, "stderr": record.stderr}

    def was_printed(self, header: Mapping[str, Any], frame: int) -> bool:
        """True if a killed driver has printed the output of this frame."""
        return header["type"] == "output" and frame <= self._printed_before.get(header["stream"], 0)

    def tail(self, slot: int, start: int) -> bytes:
        """Return the last stderr of a worker."""
        rank = self._rank_of(slot, start)
        return b"" if rank is None else self._printer.tail(rank)

    def print(self, header: Mapping[str, Any], body: bytes, frame: int, now: float) -> None:
        """Pass on a frame with output; an empty one ends the stream. Raises BadFrame."""
        slot, start, stream = header["slot"], header["start"], header["stream"]
        rank = self._rank_of(slot, start)
        if rank is None:
            raise BadFrame(f"output of a worker without a rank, in slot {slot}")
        if stream == "result":
            self._keep_result((self._number, slot, start), rank, body)
            return
        # The agent gets credit only for printed output: a slow reader of stdout slows the workers down.
        done = partial(self._printed, stream, frame)
        origin = str(self._number), frame
        if body:
            self.last_output[rank] = now
            note = None if self._frame_record is None else partial(_note, self._frame_record, stream, frame)
            self._printer.output(rank, stream, body, done, origin, note)
        else:
            self._printer.end_stream(rank, stream, done, origin)

    def _keep_result(self, worker: tuple[int, int, int], rank: int, body: bytes) -> None:
        """Keep a part of a worker's result. Raises BadFrame."""
        if self._results is None:
            raise BadFrame("a result, and the job calls no function")
        self._results.write_part(worker, rank, body)
        # A result is written at once, and needs no printer for its credit.
        if body:
            self._credit.add(len(body))

    def _printed(self, stream: Stream, frame: int, size: int) -> None:
        """Record and acknowledge a printed frame; in the printer's thread."""
        # Recorded before the acknowledgement: a successor must not ask for the frame again.
        if self._frame_record is not None:
            self._frame_record.record_printed(stream, frame)
            self._acknowledge(frame)
        if size:
            self._credit.add(size)


def _note(frame_record: "FrameRecord", stream: Stream, frame: int, is_printed: bool) -> None:
    """Record whether a frame is printed in the next moment; in the printer's thread."""
    (frame_record.record_printed if is_printed else frame_record.take_back)(stream, frame)
