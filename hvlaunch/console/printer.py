"""The printer: the one thread that writes to the terminal."""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, NamedTuple

from hvlaunch.console.color import can_redraw, colored
from hvlaunch.console.display import Display
from hvlaunch.console.files import OutputFiles
from hvlaunch.console.lines import Stream
from hvlaunch.console.prefix import Prefix
from hvlaunch.console.raw_file import RawFile, same_place
from hvlaunch.job import ConsoleOptions

__all__ = ["TAIL", "Printer"]

TAIL = 16384
"""Bytes of each rank's stderr that are kept for the failure report."""

_BATCH = 1 << 18
_MOST_LIVE_ROWS = 8


class _Output(NamedTuple):
    rank: int
    stream: Stream
    data: bytes
    done: Callable[[int], None]


class _End(NamedTuple):
    rank: int
    stream: Stream


class _Task(NamedTuple):
    """Anything else that is to be done in the printer's thread, in its turn."""

    run: Callable[[], None]


_Item = _Output | _End | _Task


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
        options: ConsoleOptions | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        """`on_broken` is called once, when the reader of stdout or stderr is gone (`hvlaunch … | head`).

        `environ` tells what the terminal can do. Raises BadUsage where the prefix is not valid.
        """
        options = options or ConsoleOptions()
        self._prefix = Prefix(options.prefix)
        self._shown = options.ranks
        self._displays = _displays(
            RawFile(stdout, "stdout"), RawFile(stderr, "stderr"), self._prefix, options, environ
        )
        self._clock = clock
        self._on_broken = on_broken
        self._files: OutputFiles | None = None
        self._tails: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._broken: set[RawFile] = set()
        self._reported: set[object] = set()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._has_ended = False
        self._is_whole = False
        self._thread = Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def keep(self, files: OutputFiles) -> None:
        """Write all output to `files` too, from here on, in place of those before; these are closed."""
        self._queue.put(_Task(lambda: self._keep(files)))

    def place(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn host and local_rank of these ranks, whose workers will be started."""
        self._queue.put(_Task(lambda: self._place(places)))

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn which ranks read what the user types: their unfinished lines are prompts, and shown on a terminal."""
        for display in set(self._displays.values()):
            self._queue.put(_Task(partial(display.read_by, ranks)))

    def answered(self) -> None:
        """The user has typed a line, which the terminal has echoed."""
        for display in set(self._displays.values()):
            self._queue.put(_Task(lambda display=display: display.answered(self._clock())))  # type: ignore[misc]

    def output(self, rank: int, stream: Stream, data: bytes, done: Callable[[int], None]) -> None:
        """Print what a worker wrote; `done(len(data))` when that was written.

        What waits (an unfinished last line, up to lines.LONGEST; a bar's state; lines to be merged) counts as
        written: its worker could otherwise never send the rest.
        """
        if stream == "stderr":
            before = b"" if rank in self._ended else self._tails.get(rank, b"")
            self._ended.discard(rank)
            self._tails[rank] = (before + data[-TAIL:])[-TAIL:]
        self._queue.put(_Output(rank, stream, data, done))
        if self._has_ended:
            self._let_go()

    def end(self, rank: int, stream: Stream) -> None:
        """The stream has ended: print its unfinished line. What comes next is another worker's, of this rank."""
        if stream == "stderr":
            self._ended.add(rank)
        self._queue.put(_End(rank, stream))

    def say(self, text: str) -> None:
        """Print hvlaunch's own message to stderr, each of its lines as `hvlaunch: …`."""
        self._queue.put(_Task(lambda: self._displays["stderr"].say(text)))

    def show(self, text: str) -> None:
        """Print text to stderr as it is: the failure report. Nothing where it is empty."""
        self._queue.put(_Task(lambda: self._displays["stderr"].show(text)))

    def status(self, text: Callable[[], str] | None) -> None:
        """What hvlaunch waits for, shown on a terminal until the next status; None: it waits for nothing."""
        self._queue.put(_Task(lambda: self._displays["stderr"].status(text, self._clock())))

    @property
    def is_whole(self) -> bool:
        """Whether all was printed that was to be, after close(); else the thread has ended before that."""
        return self._is_whole

    def tail(self, rank: int) -> bytes:
        """The last bytes, at most TAIL, that the rank's worker sent to stderr; printed or not."""
        return self._tails.get(rank, b"")

    def close(self, timeout: float | None = None) -> bool:
        """Print all that is left and end; False where it took more than `timeout` seconds (a stopped terminal).

        May be called again. What comes after it is not printed.
        """
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._print()
            self._is_whole = True
        finally:
            self._has_ended = True
            self._let_go()

    def _let_go(self) -> None:
        """Nothing is printed any more: workers must still not wait until it is."""
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, _Output):
                    item.done(len(item.data))

    def _print(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            now = self._clock()
            for item in batch:
                self._handle(item, now)
            if closing:
                self._finish(now)
            self._write(now)
            for item in batch:
                if isinstance(item, _Output):
                    item.done(len(item.data))

    def _take(self) -> tuple[list[_Item], bool]:
        """What is there now, at least one item unless something else is due; whether it is the last."""
        batch: list[_Item] = []
        size = 0
        try:
            item = self._queue.get(timeout=self._patience())
            while item is not None:
                batch.append(item)
                size += len(item.data) if isinstance(item, _Output) else 0
                if size >= _BATCH:
                    return batch, False
                item = self._queue.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _patience(self) -> float | None:
        times = [display.deadline for display in self._displays.values()]
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _handle(self, item: _Item, now: float) -> None:
        if isinstance(item, _Task):
            item.run()
            return
        key = (item.rank, item.stream)
        if isinstance(item, _Output) and self._files is not None:
            self._file(self._files, item)
        if not self._shows(item.rank):
            return
        if isinstance(item, _Output):
            self._displays[item.stream].output(key, item.data, now)
        else:
            self._displays[item.stream].end(key, now)

    def _shows(self, rank: int) -> bool:
        return self._shown is None or any(rank in part for part in self._shown)

    def _keep(self, files: OutputFiles) -> None:
        if self._files is not None:
            self._files.close()
        self._files = files

    def _place(self, places: Mapping[int, tuple[str, int]]) -> None:
        self._prefix.place(places)
        for display in set(self._displays.values()):
            display.expect(rank for rank in places if self._shows(rank))

    def _finish(self, now: float) -> None:
        for display in self._displays.values():
            display.end_all(now)
        if self._files is not None:
            self._files.close()

    def _file(self, files: OutputFiles, item: _Output) -> None:
        try:
            files.write(item.rank, item.stream, item.data)
        except OSError as error:
            self._report(
                files, f"{error.filename}: {_reason(error)}; the files of --output-filename are not complete"
            )

    def _write(self, now: float) -> None:
        for display in self._displays.values():
            while page := display.page(now):
                for file, parts in page:
                    if file not in self._broken:
                        self._write_to(file, parts)

    def _write_to(self, file: RawFile, parts: list[bytes]) -> None:
        try:
            file.write(*parts)
        except BrokenPipeError:
            self._broken.add(file)
            if self._on_broken is not None:
                on_broken, self._on_broken = self._on_broken, None
                on_broken()
        except OSError as error:
            self._report(file, f"{file.name}: {_reason(error)}; some output is lost")

    def _report(self, culprit: object, text: str) -> None:
        """Say once what is wrong with `culprit`; with the next page written."""
        if culprit not in self._reported:
            self._reported.add(culprit)
            self._displays["stderr"].say(text)


def _displays(
    out: RawFile, err: RawFile, prefix: Prefix, options: ConsoleOptions, environ: Mapping[str, str]
) -> dict[Stream, Display]:
    """Where each stream goes, stderr last; one display where both end in the same place."""

    def display(files: Mapping[Stream, RawFile], rows: int) -> Display:
        is_terminal = next(iter(files.values())).is_terminal
        return Display(
            files,
            prefix,
            color=colored(options.color, terminal=is_terminal, environ=environ),
            live_rows=rows if can_redraw(terminal=is_terminal, environ=environ) else 0,
            merge=options.merge,
        )

    if same_place(out, err):
        shared = display({"stdout": out, "stderr": err}, _MOST_LIVE_ROWS)
        return {"stdout": shared, "stderr": shared}
    # The program that reads a pipe may write to the same terminal: then only one row can be redrawn without harm.
    return {
        "stdout": display({"stdout": out}, 1 if err.is_pipe else _MOST_LIVE_ROWS),
        "stderr": display({"stderr": err}, 1 if out.is_pipe else _MOST_LIVE_ROWS),
    }


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO).lower()
