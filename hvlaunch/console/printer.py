"""The printer: the one thread that writes to the terminal."""

import errno
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from hvlaunch.console.display import Display, displays
from hvlaunch.console.files import OutputFiles
from hvlaunch.console.lines import Key, Stream
from hvlaunch.console.outlet import BATCH, Outlet, Output
from hvlaunch.console.raw_file import RawFile, new_bell
from hvlaunch.console.recent import Keeper, Origin, Place, Recent
from hvlaunch.console.status import AskStatus, OnStatus
from hvlaunch.job import ConsoleOptions

if TYPE_CHECKING:
    from datetime import datetime

    from hvlaunch.console.notes import UnfinishedLines
    from hvlaunch.console.output_store import OutputStore

__all__ = ["TAIL", "Printer"]

TAIL = 16384
"""Bytes of each rank's stderr that are kept for the failure report."""

_READ_SIZE = 4096
_LOOK = 0.1
_UNWOKEN = 0.05
"""Seconds between looks at the queue where no descriptor was left to be woken by."""


class _Word(NamedTuple):
    """What displays are told besides output, with the time then; and what is kept of it."""

    tell: Callable[[Display, float], None] | None
    stream: Stream | None = "stderr"
    """Whose display is told; None: each."""
    keep: Callable[[Keeper], None] | None = None


class _Task(NamedTuple):
    """Anything else that is to be done in the printer's thread, in its turn."""

    run: Callable[[], None]


_Item = Output | _Word | _Task


class Printer:
    """Prints workers' output, line by line, and hvlaunch's own messages. A reader who takes nothing holds up no other.

    Every method may be called from any thread, and none but close() blocks: what bounds the queue are the credit
    windows of those who call output(), which open again with `done`. `done` and `on_broken` are called in the
    printer's thread, and must neither block nor raise.
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
    ) -> None:
        """`on_broken` is called once, when the reader of stdout or stderr is gone (`hvlaunch … | head`).
        `on_status` gets every status, in the thread of status(); none is shown then.

        Where they are None, all goes to `store` alone, behind what it has already, and the printer is headless.
        `environ` tells what the terminal can do, `now` which time prefixes have. Raises BadUsage where the prefix is not valid.
        """
        options = options or ConsoleOptions()
        self._shown, self._hidden = options.ranks, options.hidden
        self._outlets: dict[Stream, Outlet] = {}
        self._each: list[Outlet] = []
        self._raw: tuple[RawFile, ...] = ()
        if stdout is not None and stderr is not None:
            self._raw = out, err = RawFile(stdout, "stdout"), RawFile(stderr, "stderr")
            shown = displays(out, err, options, environ, now)
            outlets = {id(display): Outlet(display, self._not_written) for display in shown.values()}
            self._outlets = {stream: outlets[id(display)] for stream, display in shown.items()}
            self._each = list(outlets.values())
        self._store = store
        self._recent = Recent()
        self._places: Mapping[int, Place] = {}
        self._owed: list[Output] = []
        """What is shown nowhere, and only kept."""
        self._clock = clock
        self._on_broken = on_broken
        self._on_status = on_status
        self._files: OutputFiles | None = None
        self._unfinished: UnfinishedLines | None = None
        self._tails: dict[int, bytes] = {} if store is None else store.tails(TAIL)
        self._ended: set[int] = set()
        self._reported: set[object] = set()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._has_ended = False
        self._is_whole = False
        self._has_lost = False
        self._is_taken = True
        self._patience: float | None = None
        self._last: Callable[[bool], str] | None = None
        self._taken = 0
        """How many times something was written. It tells that readers take what they get."""
        self._waits = False
        self._bell: tuple[int, int] | None = None
        self._thread = Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def keep(self, files: OutputFiles) -> None:
        """Write all output to `files` too, from here on, in place of those before; these are closed."""
        self._put(_Task(lambda: self._keep(files)))

    def keep_output(self, make_store: "Callable[[], OutputStore]") -> None:
        """Keep all output in a store too, from here on, and what was newest before. Where there is one already, nothing.

        `make_store` is called in the printer's thread, and may raise OSError.
        """
        self._put(_Task(lambda: self._begin_store(make_store)))

    def keep_unfinished(self, lines: "UnfinishedLines") -> None:
        """Note there how lines begin that are not shown yet, until all output is in a store."""
        self._put(_Task(lambda: self._keep_unfinished(lines if self._store is None else None)))

    def begun(self, lines: Mapping[Key, bytes], done: Callable[[int], None]) -> None:
        """Lines of which another driver has shown nothing begin so: keep that. `done` is called once they are."""
        for (rank, stream), text in lines.items():
            self._put(_Word(None, None, partial(_keep_line, rank, stream, text)))
        self._put(Output(0, "stdout", b"", done))

    def go_headless(self) -> None:
        """Write what stdout and stderr take at once, and then nothing more there: all is kept in the store alone.

        Returns when it is so.
        """
        is_headless = Event()

        def leave() -> None:
            for outlet in self._each:
                outlet.put(partial(outlet.display.status, None))
                outlet.write(self._clock())
                outlet.drop(self._clock())
            for file in self._raw:
                file.close()
            self._each.clear()
            self._outlets.clear()
            is_headless.set()

        self._put(_Task(leave))
        while self._thread.is_alive() and not is_headless.wait(_LOOK):
            pass

    def place(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn host and local_rank of these ranks, whose workers will be started."""
        self._places = {**self._places, **places}
        shown = {rank: place for rank, place in places.items() if self._shows(rank, None)}
        self._put(_Word(lambda display, _: display.place(shown), None, lambda keeper: keeper.place(places)))

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn which ranks read what the user types: their unfinished lines are prompts, and shown on a terminal."""
        self._put(_Word(lambda display, _: display.read_by(ranks), None))

    def in_turn(self, call: Callable[[], None]) -> None:
        """Call this when all that was put before is shown, for each terminal or file; it must neither block nor raise."""
        self._put(_Word(lambda _display, _now: call(), None))

    def answered(self) -> None:
        """The user has typed a line, which the terminal has echoed."""
        self._put(_Word(Display.answered, None))

    def output(
        self,
        rank: int,
        stream: Stream,
        data: bytes,
        done: Callable[[int], None],
        origin: Origin | None = None,
        note: Callable[[bool], None] | None = None,
    ) -> None:
        """Print what a worker wrote; `done(len(data))` when that was written, or is kept where nothing is printed; `note` as in Output.

        What waits (an unfinished last line, up to lines.LONGEST; a bar's state) counts as written: its worker could otherwise never send the rest.
        """
        if stream == "stderr" and not (self._store is not None and self._store.has(origin)):
            before = b"" if rank in self._ended else self._tails.get(rank, b"")
            self._ended.discard(rank)
            self._tails[rank] = (before + data[-TAIL:])[-TAIL:]
        self._put(Output(rank, stream, data, done, origin, note))
        if self._has_ended:
            self._let_go()

    def end(
        self,
        rank: int,
        stream: Stream,
        done: Callable[[int], None] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """The stream has ended: print its unfinished line. What comes next is another worker's, of this rank.

        `done(0)` is called when that was written.
        """
        if stream == "stderr":
            self._ended.add(rank)
        tell = (lambda display, now: display.end((rank, stream), now)) if self._shows(rank, stream) else None
        self._put(_Word(tell, stream, lambda keeper: keeper.end(rank, stream, origin)))
        if done is not None:
            self._put(Output(rank, stream, b"", done))

    def say(self, text: str) -> None:
        """Print hvlaunch's own message to stderr, each of its lines as `hvlaunch: …`."""
        self._put(self._said(text))

    def show(self, text: str) -> None:
        """Print text to stderr as it is: the failure report. Nothing where it is empty."""
        self._put(_Word(lambda display, _: display.show(text), keep=lambda keeper: keeper.show(text)))

    def status(self, ask: AskStatus | None) -> None:
        """What hvlaunch waits for, shown on a terminal until the next status; None: it waits for nothing."""
        if self._on_status is not None:
            self._on_status(ask)
        else:
            self._put(_Word(lambda display, now: display.status(ask, now)))

    @property
    def is_whole(self) -> bool:
        """Whether the thread has come to its end, after close(); else it has failed before."""
        return self._is_whole

    @property
    def has_lost(self) -> bool:
        """Whether some output could not be written, to stdout, stderr or a file, or was not taken. It was said."""
        return self._has_lost or not self._is_taken

    def tail(self, rank: int) -> bytes:
        """The last bytes, at most TAIL, that the rank's worker sent to stderr; printed or not."""
        return self._tails.get(rank, b"")

    def close(self, patience: float | None = None, last: Callable[[bool], str] | None = None) -> bool:
        """Print all that is left and end; False where not all of it was taken.

        `last` gives hvlaunch's last message; it gets whether any output was lost.

        What readers have not taken is dropped, with a word, once they have taken nothing for `patience` seconds;
        None: it never is. May be called again. What comes after it is not printed.
        """
        self._patience, self._last = patience, last
        self._put(None)
        while self._thread.is_alive():
            taken = self._taken
            self._thread.join(None if patience is None else 2 * patience + 1)
            if self._thread.is_alive() and self._taken == taken:  # in a write that does not return
                self._is_taken = False
                break
        return self._is_taken

    @staticmethod
    def _said(text: str) -> _Word:
        return _Word(lambda display, _: display.say(text), keep=lambda keeper: keeper.say(text))

    def _put(self, item: "_Item | None") -> None:
        self._queue.put(item)
        if self._waits and self._bell is not None:
            with suppress(BlockingIOError):  # then it rings already
                os.write(self._bell[1], b"\0")

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
                if isinstance(item, Output):
                    item.done(len(item.data))

    def _print(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            for item in batch:
                self._handle(item)
            if closing:
                self._finish()
            self._write(self._clock())
        self._write_the_rest()
        if self._last is not None:
            self._handle(self._said(self._last(self.has_lost)))
            self._write(self._clock())
            if self._is_taken:  # else its reader takes nothing, and was waited for
                self._write_the_rest()
        if self._store is not None:
            self._store.close()

    def _write_the_rest(self) -> None:
        last = self._clock()
        while held := [outlet for outlet in self._each if outlet.waits_at is not None]:
            patience = None if self._patience is None else last + self._patience - self._clock()
            if patience is not None and patience <= 0:
                self._drop(held, self._patience or 0.0)
                return
            self._wait(patience)
            if self._write(self._clock()):
                last = self._clock()

    def _drop(self, held: list[Outlet], patience: float) -> None:
        self._is_taken = False
        for outlet in held:
            name = outlet.waits_for
            outlet.drop(self._clock())
            self._report(outlet, f"{name}: nobody has read it for {patience:g} s; some output is lost")
        self._write(self._clock())

    def _take(self) -> tuple[list[_Item], bool]:
        """What is there now, at least one item unless something else is due; whether it is the last."""
        batch: list[_Item] = []
        size = 0
        timeout = self._until_due()
        try:
            if any(outlet.waits_at is not None for outlet in self._each):
                self._wait(timeout, is_woken=True)
                timeout = 0.0
            item = self._queue.get(timeout=timeout)
            while item is not None:
                batch.append(item)
                size += len(item.data) if isinstance(item, Output) else 0
                if size >= BATCH:
                    return batch, False
                item = self._queue.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _wait(self, timeout: float | None, *, is_woken: bool = False) -> None:
        """Until a reader takes more, or, if `is_woken`, something is put."""
        poll = select.poll()
        for outlet in self._each:
            if (descriptor := outlet.waits_at) is not None:
                poll.register(descriptor, select.POLLOUT)
        if is_woken:
            self._bell = self._bell or new_bell()
            if self._bell is None:
                timeout = _UNWOKEN if timeout is None else min(timeout, _UNWOKEN)
            else:
                poll.register(self._bell[0], select.POLLIN)
        self._waits = is_woken  # before the look at the queue: what is put from now on rings
        if not is_woken or self._queue.empty():
            poll.poll(None if timeout is None else timeout * 1000)
        self._waits = False
        if self._bell is not None:
            with suppress(BlockingIOError):
                os.read(self._bell[0], _READ_SIZE)

    def _until_due(self) -> float | None:
        known = [time for outlet in self._each if (time := outlet.deadline) is not None]
        if self._store is not None and (due := self._store.deadline) is not None:
            known.append(due)
        return max(0.0, min(known) - self._clock()) if known else None

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Task):
            item.run()
        elif isinstance(item, _Word):
            self._tell(item)
        else:
            if self._files is not None and item.data:
                item = self._file(self._files, item)
            if self._store is None:
                self._recent.add(item, len(item.data))
            else:
                item.keep(self._store)
            if self._outlets and self._shows(item.rank, item.stream):
                self._outlets[item.stream].put(item)
            else:
                self._owed.append(item)

    def _tell(self, word: _Word) -> None:
        if self._store is None:
            self._recent.add(word, 0)
        elif word.keep is not None:
            word.keep(self._store)
        if word.tell is not None:
            for outlet in self._each if word.stream is None else (self._outlets.get(word.stream),):
                if outlet is not None:
                    outlet.put(partial(word.tell, outlet.display))

    def _begin_store(self, make_store: "Callable[[], OutputStore]") -> None:
        if self._store is None:
            with suppress(OSError):  # then there is nothing to look at
                self._store = make_store()
                self._store.place(self._places)
                self._recent.pour_into(self._store)
                self._keep_unfinished(None)

    def _keep_unfinished(self, lines: "UnfinishedLines | None") -> None:
        if lines is None and self._unfinished is not None:
            self._unfinished.forget()
        self._unfinished = lines
        for outlet in self._each:
            outlet.display.keep_unfinished(lines)

    def _shows(self, rank: int, stream: Stream | None) -> bool:
        return stream not in self._hidden and (
            self._shown is None or any(rank in part for part in self._shown)
        )

    def _keep(self, files: OutputFiles) -> None:
        if self._files is not None:
            self._files.close()
        self._files = files

    def _finish(self) -> None:
        for outlet in self._each:
            outlet.put(outlet.display.end_all)
        if self._files is not None:
            self._files.close()

    def _write_store(self) -> None:
        """What only the store has is done with."""
        if self._store is not None:
            try:
                self._store.write()
            except OSError as error:
                self._has_lost = True
                self._report(self._store, f"the job's directory: {_reason(error)}; some output is not kept")
        owed, self._owed = self._owed, []
        for output in owed:
            output.done(len(output.data))

    def _file(self, files: OutputFiles, item: Output) -> Output:
        """With it, the file's size is on record too."""
        begin = files.end(item.rank, item.stream)
        try:
            files.write(item.rank, item.stream, item.data)
        except OSError as error:
            self._has_lost = True
            self._report(
                files, f"{error.filename}: {_reason(error)}; the files of --output-filename are not complete"
            )
        return item._replace(
            done=files.settler(item.rank, item.stream, item.done),
            note=files.noter(item.rank, item.stream, begin, item.note),
        )

    def _write(self, now: float) -> bool:
        """Write what is taken at once; whether that was anything."""
        self._write_store()
        has_written = [outlet.write(now) for outlet in self._each]
        self._taken += any(has_written)
        return any(has_written)

    def _not_written(self, file: RawFile, error: OSError) -> None:
        is_terminal_gone = error.errno == errno.EIO and self._store is not None  # all of it is kept
        if not isinstance(error, BrokenPipeError) and not is_terminal_gone:
            self._has_lost = True
            self._report(file, f"{file.name}: {_reason(error)}; some output is lost")
        elif self._on_broken is not None:
            on_broken, self._on_broken = self._on_broken, None
            on_broken()

    def _report(self, culprit: object, text: str) -> None:
        """Say once what is wrong with `culprit`; with the next page written."""
        if culprit not in self._reported:
            self._reported.add(culprit)
            self._handle(self._said(text))


def _keep_line(rank: int, stream: Stream, text: bytes, keeper: Keeper) -> None:
    keeper.output(rank, stream, text)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO).lower()
