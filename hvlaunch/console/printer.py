"""The printer: the one thread that writes to the terminal."""

import errno
import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, NamedTuple

from hvlaunch.console.files import OutputFiles
from hvlaunch.console.lines import LineSplitter, Screen, Stream
from hvlaunch.console.sink import Sink, same_place

__all__ = ["TAIL", "Printer", "rank_prefix"]

TAIL = 8192
"""Bytes of each rank's stderr that are kept for the failure report."""

_BATCH = 1 << 17


class _Output(NamedTuple):
    rank: int
    stream: Stream
    data: bytes
    done: Callable[[int], None]


class _End(NamedTuple):
    rank: int
    stream: Stream


class _Message(NamedTuple):
    prefix: bytes
    text: str


_Item = _Output | _End | _Message | None
"""What the queue carries; None closes the printer."""


def rank_prefix(rank: int, stream: Stream) -> bytes:
    """`[3]<stdout>: `, as horovodrun and Open MPI's --tag-output have it."""
    return b"[%d]<%s>: " % (rank, stream.encode())


class Printer:
    """Prints workers' output, line by line, and hvlaunch's own messages.

    Every method may be called from any thread, and none but close() blocks: what bounds the queue are the credit
    windows of those who call output(), which open again with `done`. `done` and `on_broken` are called in the
    printer's thread, and must neither block nor raise.
    """

    def __init__(
        self,
        stdout: BinaryIO,
        stderr: BinaryIO,
        *,
        prefix: Callable[[int, Stream], bytes] = rank_prefix,
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        """`on_broken` is called once, when the reader of stdout or stderr is gone (`hvlaunch … | head`)."""
        self._sinks: dict[Stream, Sink] = {"stdout": Sink(stdout, "stdout"), "stderr": Sink(stderr, "stderr")}
        self._shared = same_place(*self._sinks.values())
        screen = Screen()
        self._screens: dict[Stream, Screen] = {
            "stdout": screen,
            "stderr": screen if self._shared else Screen(),
        }
        self._prefix = prefix
        self._on_broken = on_broken
        self._files: OutputFiles | None = None
        self._splitters: dict[tuple[int, Stream], LineSplitter] = {}
        self._tails: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._broken: set[Sink] = set()
        self._reported: set[object] = set()
        self._page: list[tuple[Sink, list[bytes]]] = []
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._thread = Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def keep(self, files: OutputFiles) -> None:
        """Write all output to `files` too, from here on; close() closes them."""
        self._files = files

    def output(self, rank: int, stream: Stream, data: bytes, done: Callable[[int], None]) -> None:
        """Print what a worker wrote; `done(len(data))` when that was written.

        An unfinished last line waits for its end, up to lines.LONGEST, and counts as written: its worker could
        otherwise never send the rest.
        """
        if stream == "stderr":
            before = b"" if rank in self._ended else self._tails.get(rank, b"")
            self._ended.discard(rank)
            self._tails[rank] = (before + data[-TAIL:])[-TAIL:]
        self._queue.put(_Output(rank, stream, data, done))

    def end(self, rank: int, stream: Stream) -> None:
        """The stream has ended: print its unfinished line. What comes next is another worker's, of this rank."""
        if stream == "stderr":
            self._ended.add(rank)
        self._queue.put(_End(rank, stream))

    def say(self, text: str) -> None:
        """Print hvlaunch's own message to stderr, each of its lines as `hvlaunch: …`."""
        self._queue.put(_Message(b"hvlaunch: ", text))

    def show(self, text: str) -> None:
        """Print text to stderr as it is: the failure report. Nothing where it is empty."""
        if text:
            self._queue.put(_Message(b"", text))

    def tail(self, rank: int) -> bytes:
        """The last bytes, at most TAIL, that the rank's worker sent to stderr; printed or not."""
        return self._tails.get(rank, b"")

    def close(self, timeout: float | None = None) -> bool:
        """Print all that is left and end; False where it took more than `timeout` seconds (a terminal that is held).

        May be called again. What comes after it is not printed.
        """
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            for item in batch:
                self._handle(item)
            if closing:
                self._finish()
            self._write()
            for item in batch:
                if isinstance(item, _Output):
                    item.done(len(item.data))

    def _take(self) -> tuple[list[_Output | _End | _Message], bool]:
        """What is there now, at least one item; whether it is the last."""
        batch: list[_Output | _End | _Message] = []
        size = 0
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            size += len(item.data) if isinstance(item, _Output) else 0
            if size >= _BATCH:
                return batch, False
            try:
                item = self._queue.get_nowait()
            except Empty:
                return batch, False
        return batch, True

    def _handle(self, item: _Output | _End | _Message) -> None:
        if isinstance(item, _Message):
            self._message(item)
            return
        key = (item.rank, item.stream)
        splitter = self._splitters.get(key)
        if isinstance(item, _End):
            if splitter is not None:
                self._place(item.stream, key, self._prefix(*key), splitter.end())
            return
        if splitter is None:
            splitter = self._splitters[key] = LineSplitter()
        if self._files is not None:
            self._file(self._files, item)
        self._place(item.stream, key, self._prefix(*key), splitter.feed(item.data))

    def _finish(self) -> None:
        for key in sorted(self._splitters):
            self._handle(_End(*key))
        if self._files is not None:
            self._files.close()

    def _file(self, files: OutputFiles, item: _Output) -> None:
        try:
            files.write(item.rank, item.stream, item.data)
        except OSError as error:
            self._report(
                files, f"{error.filename}: {_reason(error)}; the files of --output-filename have gaps"
            )

    def _message(self, item: _Message) -> None:
        splitter = LineSplitter()
        text = item.text.encode(errors="backslashreplace")
        self._place("stderr", item.prefix, item.prefix, splitter.feed(text) + splitter.end())

    def _place(self, stream: Stream, owner: object, prefix: bytes, text: bytes) -> None:
        sink = self._sinks[stream]
        parts = self._screens[stream].place(owner, prefix, text)
        for known, written in self._page[-1:] if self._shared else self._page:
            if known is sink:
                written.extend(parts)
                return
        self._page.append((sink, parts))

    def _write(self) -> None:
        while self._page:
            page, self._page = self._page, []
            for sink, parts in page:
                if parts and sink not in self._broken:
                    self._write_to(sink, b"".join(parts))

    def _write_to(self, sink: Sink, data: bytes) -> None:
        try:
            sink.write(data)
        except BrokenPipeError:
            self._broken.add(sink)
            if self._on_broken is not None:
                on_broken, self._on_broken = self._on_broken, None
                on_broken()
        except OSError as error:
            self._report(sink, f"{sink.name}: {_reason(error)}; some output is lost")

    def _report(self, culprit: object, text: str) -> None:
        """Say once what is wrong with `culprit`; with the next page written."""
        if culprit not in self._reported:
            self._reported.add(culprit)
            self._message(_Message(b"hvlaunch: ", text))


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO).lower()
