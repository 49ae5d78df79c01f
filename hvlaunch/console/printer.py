"""The printer: the only thread that writes to the terminal.

Printer is called by any thread and puts items on a queue. PrintLoop takes them in its own thread, and alone touches
displays, files and the store. An Outlet writes the pages of a display to readers that may be slow.
"""

import errno
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, BinaryIO

from hvlaunch.console.display import Display, displays
from hvlaunch.console.lines import Key, Stream
from hvlaunch.console.raw_file import RawFile, new_bell
from hvlaunch.console.recent import Origin, OutputKeeper, Place, Recent
from hvlaunch.console.status import AskStatus, OnStatus
from hvlaunch.job import ConsoleOptions
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from hvlaunch.console.files import OutputFiles
    from hvlaunch.console.notes import UnfinishedLines
    from hvlaunch.console.output_store import OutputStore

__all__ = ["BATCH", "TAIL", "Outlet", "Output", "Printer"]


BATCH = 1 << 18
"""Maximum bytes of output on one page, not counting the last item."""


class Output(NamedTuple):
    """Output of a rank; `done(len(data))` is called when it is written.

    `note(True)` is called just before the write, and `note(False)` if the reader did not take everything at
    once. A process that is killed in between, or waits for a reader, leaves a true record.
    """

    rank: int
    stream: Stream
    data: bytes
    done: Callable[[int], None]
    origin: Origin | None = None
    note: Callable[[bool], None] | None = None

    def keep(self, keeper: OutputKeeper) -> None:
        """Pass the output to a store."""
        if self.data:
            keeper.output(self.rank, self.stream, self.data, self.origin)


class Outlet:
    """Writes a display's pages, as far as readers take them at once. `failed` receives errors of writing.

    The outlet makes no page while an earlier page is unfinished. Items put meanwhile wait in their original
    form: as lines of pages they would take several times the memory.
    """

    def __init__(self, display: Display, failed: Callable[[RawFile, OSError], None]) -> None:
        self.display = display
        self._failed = failed
        self._waiting: deque[Output | Callable[[float], None]] = deque()
        self._page: list[tuple[RawFile, Sequence[bytes | memoryview]]] = []
        self._owed: deque[tuple[float, list[Output]]] = deque()
        """Output given to the display, with the time: it is on this page, or waits to be merged."""
        self._is_noted = False
        """True if the record says that this page's output is written."""
        self._is_dropped = False
        self._broken: set[RawFile] = set()

    def put(self, item: Output | Callable[[float], None]) -> None:
        """Queue output, or a call for the display with the time of the next write()."""
        self._waiting.append(item)

    @property
    def waits_at(self) -> int | None:
        """Return the descriptor of the file that blocks the page, or None."""
        return self._page[0][0].waits_at if self._page else None

    @property
    def waits_for(self) -> str:
        """Return the name of the file that blocks the page."""
        return self._page[0][0].name

    @property
    def deadline(self) -> float | None:
        """Return the time of the next write without new output; None while a page is unfinished."""
        return None if self._page else self.display.deadline

    def write(self, now: float) -> bool:
        """Write as much as readers take; return True if that was anything."""
        has_written = False
        while True:
            while self._page:
                file, parts = self._page[0]
                if not self._is_over(file) and not file.takes_some():
                    # Return before _note(): the record must never claim output that is still to be written.
                    return has_written
                self._note(is_printed=True)
                unwritten = self._write_to(file, parts)
                has_written = has_written or sum(map(len, unwritten)) < sum(map(len, parts))
                if unwritten:
                    self._note(is_printed=False)
                    self._page[0] = file, unwritten
                    return has_written
                del self._page[0]
            self._settle()
            self._feed(now)
            # A new page only after the last one was taken: waiting items take less memory than lines of pages.
            self._page.extend(self.display.page(now))
            if not self._page and not self._waiting:
                self._settle()
                return has_written

    def _note(self, *, is_printed: bool) -> None:
        if is_printed != self._is_noted:
            self._is_noted = is_printed
            written = self._written()
            # Taken back in reverse, so that sizes on record shrink step by step.
            for output in written if is_printed else reversed(written):
                if output.note is not None:
                    output.note(is_printed)

    def _settle(self) -> None:
        """Acknowledge written output, and note the beginnings of unfinished lines."""
        self._is_noted = False
        self.display.note_unfinished()
        for output in self._written():
            output.done(len(output.data))
        for _ in range(self._paged()):
            self._owed.popleft()

    def _paged(self) -> int:
        """Return how many of the owed items are on pages already; the others wait to be merged."""
        oldest = None if self._is_dropped else self.display.oldest
        return len(self._owed) if oldest is None else sum(given < oldest for given, _ in self._owed)

    def _written(self) -> list[Output]:
        return [output for _, outputs in islice(self._owed, self._paged()) for output in outputs]

    def _feed(self, now: float) -> None:
        """Give the display one page of the waiting items."""
        size = 0
        given: list[Output] = []
        # A bounded page: its reader may take long, and merging waits for the page.
        while self._waiting and size < BATCH:
            item = self._waiting.popleft()
            if isinstance(item, Output):
                if item.data:
                    self.display.output((item.rank, item.stream), item.data, now)
                given.append(item)
                size += len(item.data)
            else:
                item(now)
        if given:
            self._owed.append((now, given))

    def _write_to(
        self, file: RawFile, parts: "Sequence[bytes | memoryview]"
    ) -> "Sequence[bytes | memoryview]":
        if self._is_over(file):
            return []
        try:
            return file.write(parts)
        except OSError as error:
            # A broken pipe stays broken; other errors, such as a full disk, may pass.
            if isinstance(error, BrokenPipeError):
                self._broken.add(file)
            self._failed(file, error)
            return []

    def _is_over(self, file: RawFile) -> bool:
        """Return True if nothing is written to `file` any more."""
        return file in self._broken or self._is_dropped

    def drop(self, now: float) -> None:
        """Forget waiting and future output: its reader takes nothing."""
        self._is_dropped = True
        self.write(now)


TAIL = 16384
"""Bytes of each rank's stderr that are kept for the failure report."""

_READ_SIZE = 4096
_LOOK = 0.1
_UNWOKEN = 0.05
"""Seconds between looks at the queue if no descriptor was left for a bell."""


class _Word(NamedTuple):
    """A call for displays, with the current time, and a call for the store that keeps its effect."""

    tell: Callable[[Display, float], None] | None
    stream: Stream | None = "stderr"
    """The stream whose display is called; None calls each display."""
    keep: Callable[[OutputKeeper], None] | None = None


class _Task(NamedTuple):
    """A call for the printer's thread, in its turn."""

    run: Callable[[], None]


_Item = Output | _Word | _Task


class _Closing(NamedTuple):
    """The arguments of close()."""

    patience: float | None = None
    last: Callable[[bool], str] | None = None


class Printer:
    """Prints workers' output, line by line, and hvlaunch's own messages. A slow reader delays no other reader.

    Every method may be called from any thread, and only close() blocks. The credit windows of the callers of output()
    bound the queue; `done` opens them again. The printer's thread calls `done` and `on_broken`, which must neither
    block nor raise.
    """

    def __init__(
        self,
        stdout: BinaryIO | None,
        stderr: BinaryIO | None,
        *,
        store: "OutputStore | None" = None,
        options: ConsoleOptions | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        now: "Callable[[], datetime] | None" = None,
        on_broken: Callable[[], None] | None = None,
        on_status: OnStatus | None = None,
        advise: Callable[[str], str] = str,
    ) -> None:
        """Start the printer's thread. Raises BadUsage if the prefix is not valid.

        Without stdout and stderr the printer is headless: it appends all output to `store`. `on_broken` is called once,
        when the reader of stdout or stderr has gone (`hvlaunch … | head`). `on_status` receives every status in the
        caller's thread, and none is shown. `environ` describes the terminal; `now` gives the time for prefixes. `advise`
        completes the advice in messages of hvlaunch.
        """
        options = options or ConsoleOptions()
        raw: tuple[RawFile, ...] = ()
        shown: dict[Stream, Display] = {}
        if stdout is not None and stderr is not None:
            raw = out, err = RawFile(stdout, "stdout"), RawFile(stderr, "stderr")
            shown = displays(out, err, options, environ, now)
        self._loop = PrintLoop(raw, shown, options, store=store, clock=clock, on_broken=on_broken)
        self._on_status = on_status
        self._advise = advise
        self._places: Mapping[int, Place] = {}
        self._tails: dict[int, bytes] = {} if store is None else store.tails(TAIL)
        self._ended: set[int] = set()
        """Ranks whose stderr has ended: their tails stay until a new worker of the rank writes."""
        self._thread = Thread(target=self._loop.run, name="printer", daemon=True)
        self._thread.start()

    def keep(self, files: "OutputFiles") -> None:
        """Write all further output to `files` too, and close the files before."""
        self._loop.put(_Task(lambda: self._loop.keep_files(files)))

    def keep_output(self, make_store: "Callable[[], OutputStore]") -> None:
        """Keep the newest and all further output in a store too. Does nothing if a store exists.

        `make_store` is called in the printer's thread, and may raise OSError.
        """
        self._loop.put(_Task(lambda: self._loop.begin_store(make_store, self._places)))

    def keep_unfinished(self, lines: "UnfinishedLines") -> None:
        """Note the beginnings of lines that are not shown yet, until a store keeps all output."""
        self._loop.put(_Task(lambda: self._loop.keep_unfinished_unless_stored(lines)))

    def begun(self, lines: Mapping[Key, bytes], done: Callable[[int], None]) -> None:
        """Keep the beginnings of lines that a previous driver had not shown. `done` is called once they are kept."""
        for (rank, stream), text in lines.items():
            self._loop.put(_Word(None, None, partial(_keep_line, rank, stream, text)))
        # An empty output is acknowledged in its turn, after the lines before it are kept.
        self._loop.put(Output(0, "stdout", b"", done))

    def go_headless(self) -> None:
        """Write what stdout and stderr take at once, then leave them: only the store keeps later output.

        Returns after the last write.
        """
        is_headless = Event()

        def leave() -> None:
            self._loop.leave_terminal()
            is_headless.set()

        self._loop.put(_Task(leave))
        # The thread may have failed, and would never set the event.
        while self._thread.is_alive() and not is_headless.wait(_LOOK):
            pass

    def learn_places(self, places: Mapping[int, Place]) -> None:
        """Learn host and local_rank of ranks before their workers start."""
        self._places = {**self._places, **places}
        shown = {rank: place for rank, place in places.items() if self._loop.shows(rank, None)}
        self._loop.put(
            _Word(
                lambda display, _: display.learn_places(shown),
                None,
                lambda keeper: keeper.learn_places(places),
            )
        )

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn the ranks that read the user's input: a terminal shows their unfinished lines as prompts."""
        self._loop.put(_Word(lambda display, _: display.read_by(ranks), None))

    def in_turn(self, call: Callable[[], None]) -> None:
        """Call `call` for each terminal or file after everything put before is shown. It must not block or raise."""
        self._loop.put(_Word(lambda _display, _now: call(), None))

    def answered(self) -> None:
        """Record that the user typed a line, which the terminal has echoed."""
        self._loop.put(_Word(Display.answered, None))

    def output(
        self,
        rank: int,
        stream: Stream,
        data: bytes,
        done: Callable[[int], None],
        origin: Origin | None = None,
        note: Callable[[bool], None] | None = None,
    ) -> None:
        """Print a worker's output; call `done(len(data))` when it is written, or kept if nothing is printed.

        `note` is as in Output. An unfinished last line (up to lines.LONGEST) and a bar's state count as written:
        otherwise the worker could never send the rest of the line.
        """
        store = self._loop.store
        # A successor gets frames again that the store has already; their text is in the tail.
        if stream == "stderr" and not (store is not None and store.has(origin)):
            before = b"" if rank in self._ended else self._tails.get(rank, b"")
            self._ended.discard(rank)
            # Cut twice: a large chunk must not be copied whole.
            self._tails[rank] = (before + data[-TAIL:])[-TAIL:]
        self._loop.put(Output(rank, stream, data, done, origin, note))
        # After put(): the thread may have ended just before, and nothing else would acknowledge
        # this output.
        if self._loop.has_ended:
            self._loop.release_queue()

    def end_stream(
        self,
        rank: int,
        stream: Stream,
        done: Callable[[int], None] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """End the stream: print its unfinished line. Later output of the rank is another worker's.

        `done(0)` is called when that is written.
        """
        if stream == "stderr":
            self._ended.add(rank)
        is_shown = self._loop.shows(rank, stream)
        tell = (lambda display, now: display.end_stream((rank, stream), now)) if is_shown else None
        self._loop.put(_Word(tell, stream, lambda keeper: keeper.end_stream(rank, stream, origin)))
        if done is not None:
            # An empty output is acknowledged in its turn, after the unfinished line is written.
            self._loop.put(Output(rank, stream, b"", done))

    def hide_tracebacks(self) -> None:
        """Show no more tracebacks of workers: they come after Ctrl-C. Files and the store keep them."""
        self._loop.put(_Word(lambda display, _: display.hide_tracebacks()))

    def say(self, text: str) -> None:
        """Print a message of hvlaunch to stderr, each line as `hvlaunch: …`."""
        self._loop.put(_message(self._advise(text)))

    def show(self, text: str) -> None:
        """Print text to stderr without a prefix: the failure report. An empty text prints nothing."""
        self._loop.put(_Word(lambda display, _: display.show(text), keep=lambda keeper: keeper.show(text)))

    def status(self, ask: AskStatus | None) -> None:
        """Show on a terminal what hvlaunch waits for, until the next status; None ends it."""
        if self._on_status is not None:
            self._on_status(ask)
        else:
            self._loop.put(_Word(lambda display, now: display.status(ask, now)))

    @property
    def is_whole(self) -> bool:
        """True if the printer's thread ended normally after close(); False if it failed."""
        return self._loop.is_whole

    @property
    def has_lost(self) -> bool:
        """True if output could not be written to stdout, stderr or a file, or no reader took it. A message said so."""
        return self._loop.has_lost

    def tail(self, rank: int) -> bytes:
        """Return the last bytes of the rank's stderr, at most TAIL, whether printed or not."""
        return self._tails.get(rank, b"")

    def close(self, patience: float | None = None, last: Callable[[bool], str] | None = None) -> bool:
        """Print the rest and end; return False if readers did not take everything.

        `last` returns hvlaunch's last message; its argument tells whether any output was lost. The printer drops the
        rest, with a message, once readers have taken nothing for `patience` seconds; with None it waits for ever.
        close() may be called again. Later output is not printed.
        """
        # Before the mark of the end: the thread reads it when it meets the mark.
        self._loop.closing = _Closing(patience, last)
        self._loop.put(None)
        while self._thread.is_alive():
            writes = self._loop.writes
            # The thread waits up to `patience` seconds for the rest, and again for the last message.
            self._thread.join(None if patience is None else 2 * patience + 1)
            # A write can block in spite of poll(): then no message can be printed either.
            if self._thread.is_alive() and self._loop.writes == writes:
                self._loop.is_taken = False
                break
        return self._loop.is_taken


class PrintLoop:
    """The printer's thread: writes the items of a queue to displays, files and the store."""

    def __init__(
        self,
        raw: tuple[RawFile, ...],
        shown: Mapping[Stream, Display],
        options: ConsoleOptions,
        *,
        store: "OutputStore | None",
        clock: Callable[[], float],
        on_broken: Callable[[], None] | None,
    ) -> None:
        self._ranks, self._hidden = options.ranks, options.hidden
        self._raw = raw
        # Both streams share an outlet if they end at the same place.
        outlets = {id(display): Outlet(display, self._not_written) for display in shown.values()}
        self._outlets: dict[Stream, Outlet] = {
            stream: outlets[id(display)] for stream, display in shown.items()
        }
        self._each = list(outlets.values())
        self.store = store
        self._recent = Recent()
        self._kept: list[Output] = []
        """Output that no display shows; it is done once the store has it."""
        self._clock = clock
        self._on_broken = on_broken
        self._files: OutputFiles | None = None
        self._unfinished: UnfinishedLines | None = None
        self._reported: set[object] = set()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self.has_ended = False
        self.is_whole = False
        self.is_taken = True
        self.closing = _Closing()
        self.writes = 0
        """Number of successful writes. A change shows that readers take their output."""
        self._bell = _Bell()

    @property
    def has_lost(self) -> bool:
        return bool(self._reported) or not self.is_taken

    def put(self, item: "_Item | None") -> None:
        """Add an item to the queue, from any thread; None ends the loop."""
        self._queue.put(item)
        self._bell.ring()

    def run(self) -> None:
        """Print until None is put."""
        try:
            self._print()
            self.is_whole = True
        finally:
            # Before the release: output() itself acknowledges whatever is put afterwards.
            self.has_ended = True
            self.release_queue()

    def release_queue(self) -> None:
        """Acknowledge output that will not be printed: workers must not wait for a printer that has ended."""
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Output):
                    item.done(len(item.data))

    def shows(self, rank: int, stream: Stream | None) -> bool:
        """Return True if the user's options show this output."""
        return stream not in self._hidden and (
            self._ranks is None or any(rank in part for part in self._ranks)
        )

    def keep_files(self, files: "OutputFiles") -> None:
        """Write output to `files` too, in place of earlier files."""
        if self._files is not None:
            self._files.close()
        self._files = files

    def begin_store(self, make_store: "Callable[[], OutputStore]", places: Mapping[int, Place]) -> None:
        """Keep all output in a store, the newest first. Without a store, others just can't look at the job."""
        if self.store is None:
            with suppress(OSError):
                self.store = make_store()
                self.store.learn_places(places)
                self._recent.pour_into(self.store)
                self._keep_unfinished(None)

    def keep_unfinished_unless_stored(self, lines: "UnfinishedLines") -> None:
        """Note unfinished lines, unless the store keeps them."""
        self._keep_unfinished(lines if self.store is None else None)

    def leave_terminal(self) -> None:
        """Write what readers take at once, then forget stdout and stderr."""
        for outlet in self._each:
            outlet.put(partial(outlet.display.status, None))
            outlet.write(self._clock())
            outlet.drop(self._clock())
        for file in self._raw:
            file.close()
        self._each.clear()
        self._outlets.clear()

    def _print(self) -> None:
        is_last = False
        while not is_last:
            batch, is_last = self._next_batch()
            for item in batch:
                self._handle(item)
            if is_last:
                self._finish()
            self._write(self._clock())
        self._write_the_rest()
        if self.closing.last is not None:
            self._handle(_message(self.closing.last(self.has_lost)))
            self._write(self._clock())
            # Otherwise the patience is used up already.
            if self.is_taken:
                self._write_the_rest()
        # Last of all: the store keeps the messages above, too.
        if self.store is not None:
            self.store.close()

    def _write_the_rest(self) -> None:
        patience = self.closing.patience
        last = self._clock()
        while waiting := [outlet for outlet in self._each if outlet.waits_at is not None]:
            left = None if patience is None else last + patience - self._clock()
            if left is not None and left <= 0:
                self._drop(waiting, patience or 0.0)
                return
            self._bell.wait_for(waiting, left)
            # A reader that takes a little at a time gets as long as it needs.
            if self._write(self._clock()):
                last = self._clock()

    def _drop(self, waiting: list[Outlet], patience: float) -> None:
        self.is_taken = False
        for outlet in waiting:
            name = outlet.waits_for
            outlet.drop(self._clock())
            self._say_once(outlet, f"{name}: nothing has read it for {patience:g} s; some output is lost")
        self._write(self._clock())

    def _next_batch(self) -> tuple[list[_Item], bool]:
        """Return the queued items, and True after the last one. Waits for an item unless something else is due."""
        batch: list[_Item] = []
        size = 0
        timeout = self._until_due()
        try:
            waiting = [outlet for outlet in self._each if outlet.waits_at is not None]
            if waiting:
                # The queue alone would not notice that a reader takes more.
                self._bell.wait_for(waiting, timeout, self._queue.empty)
                timeout = 0.0
            item = self._queue.get(timeout=timeout)
            while item is not None:
                batch.append(item)
                size += len(item.data) if isinstance(item, Output) else 0
                # A bounded page: its memory, and the time until the next deadline.
                if size >= BATCH:
                    return batch, False
                item = self._queue.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _until_due(self) -> float | None:
        times = [time for outlet in self._each if (time := outlet.deadline) is not None]
        if self.store is not None and (due := self.store.deadline) is not None:
            times.append(due)
        return max(0.0, min(times) - self._clock()) if times else None

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Task):
            item.run()
        elif isinstance(item, _Word):
            self._tell(item)
        else:
            # Files first: their sizes go on record with the output's acknowledgement.
            if self._files is not None and item.data:
                item = self._write_to_file(self._files, item)
            if self.store is None:
                # A store that begins later, for a reader of the job, gets the newest output from here.
                self._recent.add(item, len(item.data))
            else:
                item.keep(self.store)
            if self._outlets and self.shows(item.rank, item.stream):
                self._outlets[item.stream].put(item)
            else:
                self._kept.append(item)

    def _tell(self, word: _Word) -> None:
        if self.store is None:
            self._recent.add(word, 0)
        elif word.keep is not None:
            word.keep(self.store)
        if word.tell is not None:
            for outlet in self._each if word.stream is None else (self._outlets.get(word.stream),):
                if outlet is not None:
                    outlet.put(partial(word.tell, outlet.display))

    def _keep_unfinished(self, lines: "UnfinishedLines | None") -> None:
        if lines is None and self._unfinished is not None:
            self._unfinished.forget()
        self._unfinished = lines
        for outlet in self._each:
            outlet.display.keep_unfinished(lines)

    def _finish(self) -> None:
        for outlet in self._each:
            # Through the outlet's queue, after everything that waits there.
            outlet.put(outlet.display.end_all)
        if self._files is not None:
            self._files.close()

    def _write_store(self) -> None:
        """Write the store, and acknowledge output that no display shows."""
        if self.store is not None:
            try:
                self.store.write()
            except OSError as error:
                self._say_once(self.store, f"the job's directory: {_reason(error)}; some output is not kept")
        # Also after an error: workers must not stand still because output can't be kept.
        kept, self._kept = self._kept, []
        for output in kept:
            output.done(len(output.data))

    def _write_to_file(self, files: "OutputFiles", item: Output) -> Output:
        """Write output to its file; return it with calls that put the file's size on record too."""
        begin = files.size(item.rank, item.stream)
        try:
            files.write(item.rank, item.stream, item.data)
        except OSError as error:
            self._say_once(
                files, f"{error.filename}: {_reason(error)}; the files of --output-filename are not complete"
            )
        return item._replace(
            done=files.settler(item.rank, item.stream, item.done),
            note=files.noter(item.rank, item.stream, begin, item.note),
        )

    def _write(self, now: float) -> bool:
        """Write what readers take at once; return True if that was anything."""
        # The store comes first: whoever takes over must have all that a reader has seen.
        self._write_store()
        has_written = [outlet.write(now) for outlet in self._each]
        self.writes += any(has_written)
        return any(has_written)

    def _not_written(self, file: RawFile, error: OSError) -> None:
        # The store keeps everything.
        is_terminal_gone = error.errno == errno.EIO and self.store is not None
        if not isinstance(error, BrokenPipeError) and not is_terminal_gone:
            self._say_once(file, f"{file.name}: {_reason(error)}; some output is lost")
        elif self._on_broken is not None:
            on_broken, self._on_broken = self._on_broken, None
            on_broken()

    def _say_once(self, culprit: object, text: str) -> None:
        """Report lost output once for each `culprit`, on the next page."""
        if culprit not in self._reported:
            self._reported.add(culprit)
            self._handle(_message(text))


class _Bell:
    """A pipe that wakes the printer's thread while it waits for slow readers.

    Without slow readers the queue itself wakes the thread, which is cheaper than a write for each item.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._is_waiting = False

    def ring(self) -> None:
        """Wake the thread, from any thread."""
        if self._is_waiting and self._pipe is not None:
            # A full pipe wakes it as well.
            with suppress(BlockingIOError):
                os.write(self._pipe[1], b"\0")

    def wait_for(
        self, outlets: Iterable[Outlet], timeout: float | None, is_idle: Callable[[], bool] | None = None
    ) -> None:
        """Wait until a reader takes more, or until ring(), if `is_idle` is given and returns True."""
        poll = select.poll()
        for outlet in outlets:
            if (descriptor := outlet.waits_at) is not None:
                poll.register(descriptor, select.POLLOUT)
        if is_idle is not None:
            # Made for the first slow reader: most jobs need no descriptors for it.
            self._pipe = self._pipe or new_bell()
            if self._pipe is None:
                timeout = _UNWOKEN if timeout is None else min(timeout, _UNWOKEN)
            else:
                poll.register(self._pipe[0], select.POLLIN)
        # Set before is_idle() looks at the queue: an item put in between rings, and is not missed.
        self._is_waiting = is_idle is not None
        if is_idle is None or is_idle():
            poll.poll(None if timeout is None else timeout * 1000)
        self._is_waiting = False
        if self._pipe is not None:
            with suppress(BlockingIOError):
                os.read(self._pipe[0], _READ_SIZE)


def _message(text: str) -> _Word:
    return _Word(lambda display, _: display.say(text), keep=lambda keeper: keeper.say(text))


def _keep_line(rank: int, stream: Stream, text: bytes, keeper: OutputKeeper) -> None:
    keeper.output(rank, stream, text)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO).lower()
