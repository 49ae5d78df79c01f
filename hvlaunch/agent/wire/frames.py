"""Frames between driver and agent: their forms, their bytes, and their numbers across connections. For both ends.

A frame is two lengths, a small JSON header, and raw bytes. The header has the type and small values; the body is
output, stdin, or the workers of a `start`. docs/internals/wire.md lists the types.

Frames travel in pieces. A start-up file of the login shell can leave a program running that prints into the channel for
as long as it likes. A write of at most PIPE_BUF bytes into a pipe is atomic (POSIX, write; pipe(7)): each piece is a
single write, with a mark and a number before it and a mark behind it. Foreign output can only stand between pieces, and
driver/links/agent_channel.py separates it.

A connection keeps the order of its frames, so frames carry no numbers: both ends count. When another connection
replaces it, each end reports its count, and gets the frames behind this count again.

Driver and agent check each received frame against a table of forms: agent/wire/channel.py has the driver's frames, and
driver/links/agent_channel.py the agents'. A frame without a form is an error. A form has a shape for each field: a
function from a JSON value to True or False.
"""

from __future__ import annotations

from hvlaunch.agent.quick import deque, dumps, loads, socket, struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

    Frame = Tuple[Dict[str, Any], bytes]
    Shape = Callable[[Any], bool]

__all__ = [
    "BY_AGENT",
    "BY_DRIVER",
    "END",
    "ERRAND_CHUNK",
    "ERRAND_WINDOW",
    "FRAME_COST",
    "HEAD",
    "LASTING",
    "LAST_OUTPUT",
    "LONGEST_ARGUMENTS",
    "LONGEST_ERROR",
    "LONGEST_RESULT",
    "LONGEST_TEXT",
    "LONGEST_TRACEBACK",
    "MOST_ADDRESSES",
    "MOST_ERRANDS",
    "MOST_GPUS",
    "MOST_PORTS",
    "MOST_RELAYED",
    "NUMBERS",
    "OUTPUT_CHUNK",
    "PORT",
    "PROTOCOL",
    "RELAY_CHUNK",
    "RELAY_WINDOW",
    "ROOM",
    "SELDOM",
    "START",
    "STREAMS",
    "BadFrame",
    "Choice",
    "Decoder",
    "Form",
    "PieceWriter",
    "Session",
    "StaleEpoch",
    "address",
    "encode",
    "exactly",
    "flag",
    "is_of_epoch",
    "mapping",
    "misfit",
    "number",
    "of",
    "or_null",
    "pair",
    "plain",
    "record",
    "several",
    "text",
    "whole",
]

_QUOTED = 40


def whole(least: int, most: int) -> Shape:
    """An integer within these bounds; true and false are no integers."""
    # type() and not isinstance(): for Python, True is an int.
    return lambda value: type(value) is int and least <= value <= most


PORT = whole(1, 65535)


def number(least: float, most: float) -> Shape:
    """A finite number, whole or not."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def text(most: int, *, raw: bool = False) -> Shape:
    """A text of at most so many characters; unless `raw`, without control characters for a terminal."""
    return lambda value: type(value) is str and len(value) <= most and (raw or value.isprintable())


def flag(value: Any) -> bool:
    return type(value) is bool


def address(value: Any) -> bool:
    """An IPv4 or IPv6 address, without a zone."""
    # inet_pton would stop at a null byte, and accept the text before it.
    if type(value) is not str or not value.isascii() or "\0" in value:
        return False
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in value else socket.AF_INET, value)
    except OSError:
        return False
    return True


def of(*values: str) -> Shape:
    """Any of these words."""
    return lambda value: type(value) is str and value in values


def or_null(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def several(shape: Shape, most: int) -> Shape:
    """A list of at most so many values."""
    return lambda value: type(value) is list and len(value) <= most and all(map(shape, value))


def pair(first: Shape, second: Shape) -> Shape:
    """A list of two values."""
    return lambda value: (
        type(value) is list and len(value) == len((first, second)) and first(value[0]) and second(value[1])
    )


def exactly(shape: Shape, count: int) -> Shape:
    """A list of exactly so many values."""
    return lambda value: type(value) is list and len(value) == count and all(map(shape, value))


def mapping(name: Shape, shape: Shape, most: int) -> Shape:
    """An object with at most so many entries; names and values have these shapes."""
    return lambda value: (
        type(value) is dict and len(value) <= most and all(name(key) and shape(value[key]) for key in value)
    )


def record(shapes: Mapping[str, Shape], optional: Sequence[str] = ()) -> Shape:
    """An object with exactly these names; the `optional` ones may be missing."""
    return lambda value: type(value) is dict and _misfit(shapes, optional, value) is None


def _misfit(shapes: Mapping[str, Shape], optional: Sequence[str], value: Dict[str, Any]) -> Optional[str]:
    for name, shape in shapes.items():
        if name not in value:
            if name not in optional:
                return "no " + name
        elif not shape(value[name]):
            return "a wrong " + name
    # Unknown names are errors: a driver or agent of the same version sends none.
    if len(value) > len(shapes) or not value.keys() <= shapes.keys():
        return "more than it may have"
    return None


class Form:
    """The form of a frame: the fields of its header, and the size of its body."""

    def __init__(
        self,
        body: int = 0,
        least: int = 0,
        fields: Optional[Mapping[str, Shape]] = None,
        optional: Sequence[str] = (),
        **more: Shape,
    ) -> None:
        """The body has `least` to `body` bytes; the header has the fields in `fields` and `more`.

        Fields in `optional` may be missing.
        """
        self._optional = optional
        self.fields: Dict[str, Shape] = {"type": _any, **(fields or {}), **more}
        self.most = body
        self.least = least

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """Return why the frame does not have this form; None for a match."""
        cause = _misfit(self.fields, self._optional, header)
        if cause is None and not self.least <= len(body) <= self.most:
            return "a body of %d bytes" % len(body)
        return cause


class Choice:
    """A frame with several forms; the field `name` chooses the form."""

    def __init__(self, name: str, **forms: Form) -> None:
        self._name = name
        self.forms = forms
        # The field itself is part of each form, or misfit() would call it unknown.
        for form in forms.values():
            form.fields[name] = _any

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """Return why the frame has no form; None for a match."""
        # The value may be of any type, and an unhashable one would raise TypeError in get().
        chosen = header.get(self._name)
        form = self.forms.get(chosen) if type(chosen) is str else None
        return "a wrong " + self._name if form is None else form.misfit(header, body)


def _any(value: Any) -> bool:  # noqa: ARG001 (a shape like the others)
    return True


def misfit(table: Mapping[str, Union[Form, Choice]], header: Dict[str, Any], body: bytes) -> Optional[str]:
    """Return in a line why the frame matches no form in the table; None for a match."""
    kind = header["type"]
    form = table.get(kind)
    if form is None:
        return "a frame of the unknown type %s" % plain(kind, _QUOTED)
    cause = form.misfit(header, body)
    return None if cause is None else "a frame of type %s with %s" % (kind, cause)


def plain(words: str, most: int) -> str:
    """Return a text for text(most): control characters escaped as in Python, and too long a text cut."""
    if not words.isprintable():
        words = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words[:most])
    return words if len(words) <= most else words[: most - 3] + "..."


PROTOCOL = 7

LONGEST_TEXT = 4096
"""Characters of a cause, a path, or a name."""
LONGEST_ERROR = 1 << 18
"""Bytes of a worker's error file."""
LONGEST_TRACEBACK = 1 << 16
LONGEST_ARGUMENTS = LONGEST_RESULT = 1 << 20
"""Bytes of an errand's arguments and of its result, as JSON."""
ERRAND_WINDOW = 1 << 20
"""Bytes of an errand's stream that one side may send before the other has taken any."""
ERRAND_CHUNK = 1 << 16
"""The most bytes of a stream in one frame."""
MOST_ERRANDS = 16
"""Errands that run on one host at a time."""
MOST_ADDRESSES = 4096
MOST_GPUS = 256
MOST_PORTS = 64
"""Most `{port:NAME}` of a job."""
OUTPUT_CHUNK = 1 << 16
"""Bytes of output in one frame."""
FRAME_COST = 256
"""Credit for each output frame besides its bytes: the driver keeps frames until they are printed, even small ones."""
LAST_OUTPUT = 1 << 20
"""Bytes of each stream that the agent may send without credit once the worker has ended."""
RELAY_WINDOW = 1 << 18
"""Bytes of a relayed connection that either side may send before the other has passed any on."""
RELAY_CHUNK = 1 << 15
"""Limit for a relayed frame: an output frame waits for at most this many bytes."""
MOST_RELAYED = 1024
"""Connections that are relayed for one host at a time."""

START = b"\x00\xfehvl\xfe\x00\x01"
"""The mark before a piece: no text contains it."""

END = b"\x02\xfdhv"
HEAD = struct.Struct("!8sIH")
NUMBERS = 0xFFFFFFFF
_PIPE_BUF = 4096
ROOM = _PIPE_BUF - HEAD.size - len(END)

_LENGTHS = struct.Struct("!II")
_MAX_HEADER = 1 << 20
_MAX_BODY = 1 << 28


class BadFrame(Exception):
    """The bytes are no frame: the other side is not hvlaunch, or another program wrote into the channel."""


def encode(header: Dict[str, Any], body: bytes = b"") -> bytes:
    text = dumps(header).encode("ascii")
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Splits received bytes into frames. With a `table` of forms, raises BadFrame for a frame without a form."""

    def __init__(
        self, table: Optional[Mapping[str, Union[Form, Choice]]] = None, most: int = _MAX_BODY
    ) -> None:
        """A body may have at most `most` bytes."""
        self._table = table
        self._most = most
        self._chunks: List[bytes] = []
        self._have = 0
        self._need = _LENGTHS.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with `data`. Raises BadFrame."""
        # Joined only once a frame is whole: joining at each read would copy a long body again and again.
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        buffer = b"".join(self._chunks)
        start = 0
        while True:
            self._need = _LENGTHS.size
            if len(buffer) - start < self._need:
                break
            header_size, body_size = _LENGTHS.unpack_from(buffer, start)
            # Checked before the bytes have come, so that a stranger can't make memory grow.
            if header_size > _MAX_HEADER or body_size > self._most:
                raise BadFrame("a frame of %d + %d bytes" % (header_size, body_size))
            self._need += header_size + body_size
            if len(buffer) - start < self._need:
                break
            split = start + _LENGTHS.size + header_size
            end = start + self._need
            try:
                header = loads(buffer[start + _LENGTHS.size : split].decode("ascii"))
            except (ValueError, RecursionError) as error:
                raise BadFrame("a header that is not JSON: %s" % error) from None
            # Checked here, because the table is looked up by the type.
            if not isinstance(header, dict) or not isinstance(header.get("type"), str):
                raise BadFrame("a header without a type")
            body = buffer[split:end]
            if self._table is not None:
                wrong = misfit(self._table, header, body)
                if wrong is not None:
                    raise BadFrame(wrong)
            # A generator, so that frames before a broken frame are still handled.
            yield header, body
            start = end
        partial = buffer[start:]
        self._chunks = [partial] if partial else []
        self._have = len(partial)


class PieceWriter:
    """Cuts the bytes of a channel into numbered pieces."""

    def __init__(self) -> None:
        self._number = 0

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces of `data`, each for a single write."""
        for start in range(0, len(data), ROOM):
            part = data[start : start + ROOM]
            yield b"".join((HEAD.pack(START, self._number, len(part)), part, END))
            self._number = (self._number + 1) & NUMBERS


STREAMS = 2
LASTING, _OF_EPOCH = range(STREAMS)
BY_DRIVER: Mapping[str, int] = {
    **dict.fromkeys(("hello", "call", "probe", "start", "stop", "signal", "bye"), LASTING),
    **dict.fromkeys(("stdin", "relay", "ack", "errand", "hold"), _OF_EPOCH),
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
    **dict.fromkeys(("stdin_taken", "relay", "errand", "held", "no_preload"), _OF_EPOCH),
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
