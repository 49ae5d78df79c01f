"""Lines of output: cut from chunks, with a prefix (--prefix), and arranged on a screen that many streams share.

Progress bars are kept apart from lines that stay. Text of hosts is made safe for a terminal.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import host_set, number_set
from hvlaunch.job import ConsoleOptions

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "ASCTIME",
    "INTERVAL",
    "LONGEST",
    "Bars",
    "Key",
    "LineSplitter",
    "Prefix",
    "Screen",
    "Stream",
    "TracebackFilter",
    "aligned",
    "visible",
    "visible_line",
]


Stream = Literal["stdout", "stderr"]

Key = tuple[int, Stream]
"""A rank and one of its streams."""

LONGEST = 1 << 20
"""Maximum bytes kept of an unfinished line; a longer line is passed on in pieces."""

_EMPTY_RETURNS = rb"(?<=\n)\r+(?![\r\n])"
_RETURNED_ENDS = rb"\r+\n"
_REPEATED = rb"\r\r+"
_FIRST_END = rb"[\r\n]"


_TRACEBACK = (
    b"Traceback (most recent call last):",
    b"During handling of the above exception",
    b"The above exception was the direct cause",
)
_RANK = re.compile(rb"^\[rank[0-9]+\]: ?")


class LineSplitter:
    r"""Splits one stream's bytes into complete lines.

    A permanent line ends with `\n`, also instead of `\r\n`. A line that ends with a lone `\r` is a state of a
    progress bar, and the next line overwrites it. Repeated `\r` count once. A lone `\r` at the start of a line
    ends nothing: many progress bars begin with it. All other bytes pass unchanged, whether UTF-8 or not. The
    result does not depend on how chunks are cut.
    """

    __slots__ = ("_drawing", "_inside", "_returned", "_waiting", "has_states")

    def __init__(self) -> None:
        self.has_states = False
        """True if the last result of feed() contains a state of a progress bar, or the unfinished line is a state."""
        self._waiting = bytearray()
        # True inside a long line whose beginning was passed on.
        self._inside = False
        # True if the last chunk ended with \r: a \n may follow.
        self._returned = False
        # True after a \r without a later \n.
        self._drawing = False

    @property
    def state(self) -> bytes | None:
        """The unfinished line if a terminal would show it as a progress bar, or else None."""
        return bytes(self._waiting) if self._drawing or self._returned else None

    @property
    def unfinished(self) -> bytes:
        """The unfinished line, unless it is a progress bar's or is passed on in pieces."""
        return b"" if self._inside or self.state is not None else bytes(self._waiting)

    @property
    def waiting(self) -> int:
        """Size of the unfinished line in bytes, of any kind."""
        return len(self._waiting)

    def forget(self) -> None:
        """Drop the unfinished line, which has ended elsewhere: the next byte begins a line."""
        self._waiting.clear()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes, and a piece of a line after LONGEST bytes without an end."""
        returns = self._returned or b"\r" in data
        if returns:
            data = self._without_returns(data)
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        else:
            cut = data.rfind(b"\n") + 1
            self._drawing = self._drawing and not cut
        if cut:
            ready = b"".join((self._waiting, memoryview(data)[:cut]))
            self._waiting.clear()
            self._inside = False
        else:
            ready = b""
        self._waiting += memoryview(data)[cut:]
        # A worker that writes no newline must not fill the driver's memory.
        if len(self._waiting) >= LONGEST:
            ready += self._waiting
            self._waiting.clear()
            self._inside = True
            self._drawing = False
        self.has_states = self._drawing or self._returned or (returns and b"\r" in ready)
        return ready

    def finish(self) -> bytes:
        """Return the unfinished last line, now ended, or b"". The next bytes belong to a new stream."""
        ready = bytes(self._waiting) + b"\n" if self._waiting or self._inside else b""
        self._waiting.clear()
        self._inside = self._returned = self._drawing = False
        return ready

    def _without_returns(self, data: bytes) -> bytes:
        r"""Normalize `\r\n` and repeated `\r` in `data`; keep trailing `\r` for the next chunk."""
        if self._returned:
            # The \r of the last chunk counts now that its successor is known.
            data = b"\r" + data
        text = data.rstrip(b"\r")
        self._returned = len(text) < len(data)
        text = text.replace(b"\r\n", b"\n")
        if b"\r" not in text:
            self._drawing = self._drawing and b"\n" not in text
            return text
        self._drawing = text.rfind(b"\r") > text.rfind(b"\n") or (self._drawing and b"\n" not in text)
        if self._waiting or self._inside:
            text = re.sub(_EMPTY_RETURNS, b"", text)
        else:
            text = re.sub(_EMPTY_RETURNS, b"", b"\n" + text)[1:]
        text = re.sub(_REPEATED, b"\r", re.sub(_RETURNED_ENDS, b"\n", text))
        if self._inside and (end := re.search(_FIRST_END, text)):
            # The beginning of the line was passed on and can't be overwritten, so the line ends here.
            text = text[: end.start()] + b"\n" + text[end.end() :]
        return text


class TracebackFilter:
    """Removes Python tracebacks from the lines of several streams, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._is_open: dict[Key, bool] = {}
        """False for a stream whose traceback has ended: another may follow, behind an empty line."""

    def feed(self, key: Key, text: bytes) -> bytes:
        """Return the text, complete lines of a stream, without tracebacks."""
        return b"".join(
            line for line in text.splitlines(keepends=True) if not self._is_of_traceback(key, line)
        )

    def _is_of_traceback(self, key: Key, line: bytes) -> bool:
        # torch has the rank before each line.
        line = _RANK.sub(b"", line)
        if line.startswith(_TRACEBACK):
            self.count += line.startswith(_TRACEBACK[0]) and key not in self._is_open
            self._is_open[key] = True
        elif line.strip() and not line.startswith(b" "):
            # A traceback ends with the first line that is not indented: the exception.
            if not self._is_open.pop(key, False):
                return False
            self._is_open[key] = False
        return key in self._is_open


class Screen:
    """Arranges the output of many owners on one terminal or file.

    Each line has a prefix, and no line is cut by another.
    """

    def __init__(self) -> None:
        # The owner of an unfinished line at the end of the screen.
        self._open: Hashable = None
        self.tracebacks: TracebackFilter | None = None
        """Filter of tracebacks on stderr; None to show them."""
        # Owners whose unfinished line another owner has ended: their own newline would be an empty line.
        self._cut: set[Hashable] = set()

    @property
    def is_whole(self) -> bool:
        """True if the last line has ended: the next text begins at the start of a line."""
        return self._open is None

    def arrange(self, owner: Hashable, prefix: bytes, text: bytes) -> list[bytes]:
        """Return the parts to write for `text` (lines, perhaps with a piece of a line at the end)."""
        parts: list[bytes] = []
        if owner in self._cut:
            self._cut.remove(owner)
            text = text.removeprefix(b"\n")
        if not text:
            return parts
        if self._open != owner:
            if self._open is not None:
                parts.append(b"\n")
                self._cut.add(self._open)
            parts.append(prefix)
        between = b"\n" + prefix
        if text.endswith(b"\n"):
            parts += (text[:-1].replace(b"\n", between), b"\n")
            self._open = None
        else:
            parts.append(text.replace(b"\n", between))
            self._open = owner
        return parts


def visible(text: str) -> str:
    """Escape control characters as Python does: the text may be a host's. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def visible_line(text: str) -> str:
    """Escape newlines and tabs as well: for a name within a line or a table."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


INTERVAL = 0.5
"""Seconds between two states of one bar that are printed as lines."""

_SETTLED = 0.2
"""Seconds after which an unfinished state counts as complete."""

_SEGMENTS = rb"[^\r\n]*[\r\n]|[^\r\n]+"
_INVISIBLE = rb"\x1b\[[0-?]*[ -/]*[@-~]|\s"


class _Bar:
    __slots__ = ("changed", "erased", "shown", "state", "unfinished")

    def __init__(self) -> None:
        # The last complete state that is not printed yet.
        self.state = b""
        # The bytes after it.
        self.unfinished = b""
        self.changed = 0.0
        # The last state that was printed as a line.
        self.shown = b""
        # True after the worker has overwritten its bar with blanks, as tqdm does at the end.
        self.erased = False


class Bars:
    """The bars of many streams, by key. `now` is in seconds of any monotonic clock.

    On a terminal (`live`), `current` returns the bars to draw. Elsewhere the last state of each INTERVAL is
    printed as a line: `due` returns these lines, and `deadline` tells when.
    """

    def __init__(self, *, live: bool) -> None:
        self.deadline: float | None = None
        self._live = live
        self._bars: dict[Key, _Bar] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._bars

    def feed(self, key: Key, text: bytes, unfinished: bytes | None, now: float) -> bytes:
        r"""Return the part of `text` that stays: lines that end with `\n`.

        `text` is the result of LineSplitter.feed, and `unfinished` its state afterwards. A line that ends a bar
        stays in the bar's last place. A line that repeats the last printed state is left out.
        """
        bar = self._bars.setdefault(key, _Bar())
        lines = []
        for segment in re.findall(_SEGMENTS, text):
            if segment.endswith(b"\r"):
                self._draw(bar, segment[:-1])
                continue
            if not bar.shown or bar.state or segment[:-1] != bar.shown:
                lines.append(segment)
            bar.shown = b""
            if not bar.erased:
                bar.state = b""
        if unfinished and _is_blank(unfinished):
            self._draw(bar, unfinished)
            unfinished = None
        unfinished = unfinished or b""
        if text or unfinished != bar.unfinished:
            bar.unfinished, bar.changed = unfinished, now
        if not (bar.state or bar.unfinished or bar.shown):
            del self._bars[key]
        elif not self._live and self.deadline is None:
            self.deadline = now + INTERVAL
        return b"".join(lines)

    def finish(self, key: Key) -> bytes:
        """Return the bar's last state as a line, if the stream ended with it."""
        bar = self._bars.pop(key, None)
        return bar.state + b"\n" if bar is not None and bar.state else b""

    def current(self) -> dict[Key, bytes]:
        """Return the visible bars."""
        shown = ((key, bar.unfinished or bar.state) for key, bar in self._bars.items())
        return {key: text for key, text in shown if text}

    def due(self, now: float) -> list[tuple[Key, bytes]]:
        """Return the lines to print now, with their keys; an empty list before `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None
        lines = []
        for key, bar in list(self._bars.items()):
            settled = now - bar.changed >= _SETTLED
            text = bar.unfinished if settled and bar.unfinished else bar.state
            # A bar that stands still is not printed again and again.
            if text and text != bar.shown:
                lines.append((key, text + b"\n"))
                bar.shown = text
            bar.state = b""
            if bar.erased:
                bar.shown, bar.erased = b"", False
            if bar.unfinished and not settled:
                self.deadline = now + INTERVAL
            if not (bar.unfinished or bar.shown):
                del self._bars[key]
        return lines

    def _draw(self, bar: _Bar, state: bytes) -> None:
        blank = _is_blank(state)
        bar.erased = blank and not self._live
        # A blank state erases the bar; its last visible state stays for a pipe.
        if not blank:
            bar.state = b"" if state == bar.shown else state
        elif self._live:
            bar.state = b""


def _is_blank(state: bytes) -> bool:
    return not re.sub(_INVISIBLE, b"", state)


ASCTIME = "{time:%a %b %e %H:%M:%S %Y}"
"""As asctime(3): horovodrun's -prefix-timestamp puts it before the prefix."""

_FIELDS = ("rank", "host", "local_rank", "time", "stream")
_TIME = "%Y-%m-%d %H:%M:%S"
_MOST_KNOWN = 4096
_TOO_WIDE = re.compile(r"[0-9]{4}")


class Prefix:
    """A template with fields in braces, filled in for a rank or a set of ranks.

    Fields may have a format: `{rank:03}`, `{time:%H:%M:%S}`. A set of ranks ignores formats for numbers.
    """

    def __init__(
        self,
        template: str = ConsoleOptions().prefix,
        *,
        now: "Callable[[], datetime] | None" = None,
        labels: Sequence[str] = (),
    ) -> None:
        """Check the template. `now` returns the local time, by default this machine's. Raises BadUsage.

        `labels` are shown in place of ranks.
        """
        self._labels = labels
        self._template = template
        self._has_time = "time" in _checked(template)
        self._now = now or _now
        self._places: dict[int, tuple[str, int]] = {}
        self._known: dict[tuple[tuple[int, ...], Stream], bytes] = {}

    def learn_places(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn host and local_rank of these ranks."""
        self._places.update(places)
        # Cached prefixes may have been made without the hosts.
        self._known.clear()

    def text_for(self, ranks: tuple[int, ...], stream: Stream) -> bytes:
        """Return the prefix of a line written by all of `ranks` (at least one)."""
        key = (ranks, stream)
        text = self._known.get(key)
        if text is None:
            fields = _Fields(lambda name: self._value(name, ranks, stream))
            text = self._template.format_map(fields).encode(errors="surrogateescape")
            # Bounded: with --merge, sets of ranks are as many as subsets.
            if not self._has_time and len(self._known) < _MOST_KNOWN:
                self._known[key] = text
        return text

    def _value(self, name: str, ranks: tuple[int, ...], stream: Stream) -> Any:
        match name:
            case "rank" if self._labels:
                return ",".join(self._labels[rank] for rank in ranks)
            case "rank":
                return ranks[0] if len(ranks) == 1 else number_set(ranks)
            case "local_rank":
                local = {self._place(rank)[1] for rank in ranks}
                return min(local) if len(local) == 1 else number_set(local)
            case "host":
                hosts = dict.fromkeys(self._place(rank)[0] for rank in ranks)
                return next(iter(hosts)) if len(hosts) == 1 else host_set(hosts)
            case "time":
                return self._now()
            case _:
                return stream

    def _place(self, rank: int) -> tuple[str, int]:
        return self._places.get(rank, ("?", 0))


class _Fields(dict[str, "_Field"]):
    """The mapping for str.format_map; it asks `value` only for fields of the template."""

    def __init__(self, value: Callable[[str], Any], *, strict: bool = False) -> None:
        super().__init__()
        self._value = value
        self._strict = strict

    def __missing__(self, name: str) -> "_Field":
        field = self[name] = _Field(self._value(name), strict=self._strict)
        return field


class _Field:
    """A value that accepts formats, but no attributes or indices: a template must not reach into objects."""

    def __init__(self, value: Any, *, strict: bool) -> None:
        self._content = value
        self._strict = strict

    def __format__(self, spec: str) -> str:
        if self._strict and _TOO_WIDE.search(spec):
            raise ValueError(f"a field would have thousands of characters ({spec})")
        if hasattr(self._content, "strftime"):
            return str(self._content.strftime(spec or _TIME))
        try:
            return format(self._content, spec)
        except (ValueError, OverflowError):
            if self._strict:
                raise
            return str(self._content)

    def __str__(self) -> str:
        return format(self, "")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        # {rank.__class__} must not reach Python's internals.
        raise ValueError(f"a field has no part .{name}")

    def __getitem__(self, name: object) -> Any:
        raise ValueError(f"a field has no part [{name}]")


def _checked(template: str) -> set[str]:
    """Return the names of the template's fields. Raises BadUsage."""
    if "\n" in template or "\r" in template:
        raise BadUsage(f"--prefix {template!r}: must be one line")
    fields = _Fields(_sample, strict=True)
    try:
        template.format_map(fields)
    except KeyError as error:
        fields_hint = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise BadUsage(
            f"--prefix {template!r}: unknown field {{{error.args[0]}}}", hint=fields_hint
        ) from None
    except ValueError as error:
        hint = "a format of Python, or {{ and }} for braces that are not a field"
        raise BadUsage(f"--prefix {template!r}: {str(error).lower()}", hint=hint) from None
    return set(fields)


def _sample(name: str) -> Any:
    if name not in _FIELDS:
        raise KeyError(name)
    return _now() if name == "time" else 0 if name.endswith("rank") else ""


def _now() -> "datetime":
    from datetime import datetime  # noqa: PLC0415 - most prefixes have no time

    return datetime.now().astimezone()
