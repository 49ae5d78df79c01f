"""Measures the network to other hosts: ports that can be reached, latency, loss, bandwidth, and the largest segments.

A host listens at some ports, and dials other hosts for the driver. Both ends prove that they have the key of this
visit (agent/wire/probe.py), bound to the address and port: strangers get no answer, and their answers don't count.

The host writes a line with its ports, and then answers lines of dials by lines of measures, in the same order.
"""

from __future__ import annotations

import _thread
import select
import time

from hvlaunch.agent.errands import answer_lines, write_line
from hvlaunch.agent.facts import free_port
from hvlaunch.agent.quick import READ, Selector, socket, struct
from hvlaunch.agent.wire.frames import PORT, address, number, or_null, record, several, text, whole
from hvlaunch.agent.wire.probe import ANSWER_SIZE, Beacon, Prover, Question, reach

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "MEASURES", "PORTS", "RESULT", "run"]

ARGUMENTS = record(
    {
        "key": text(100),
        "name": text(1000, raw=True),
        "address": or_null(address),  # of this host for others, perhaps behind NAT
        "ports": several(PORT, 4),  # to listen at, beside some that this host chooses
    }
)
RESULT = record({})
PORTS = record({"ports": several(PORT, 16), "low": PORT, "high": PORT})
_SECONDS = number(0, 1000)
MEASURES = several(
    record(
        {
            "reached": several(PORT, 64),
            "address": or_null(address),
            "rtt": or_null(_SECONDS),  # of the fastest of some messages
            "loss": or_null(number(0, 1)),  # share of segments that were sent again
            "rate": or_null(number(0, 1e15)),  # bytes/s
            "mtu": or_null(
                whole(0, 1 << 16)
            ),  # the largest that passes if larger ones vanish; 0 if none is known to
        }
    ),
    64,
)

_TCP_INFO_SIZE = 256
_AGAIN_AT, _SENT_AT, _UNNEEDED_AT = 100, 136, 216
"""Offsets of tcpi_total_retrans, of tcpi_segs_out, and of tcpi_dsack_dups, since Linux 4.19."""
_SAMPLES = 4
"""Ports of the ephemeral range to listen at."""
_HEADER = struct.Struct("!QI")
"""Bytes to come, and milliseconds after the first byte until the answer."""
_TIMEVAL = struct.Struct("@ll")  # of SO_RCVTIMEO, socket(7)
_GO = b"g"
_ANSWER = struct.Struct("!Qd")
"""Received bytes, and seconds from the first to the last."""
_PINGS, _FEW_PINGS = 12, 4
_NEAR = 0.001
"""Seconds of a round trip after which a few messages do: far below every limit for a good network."""
_SMALL = 1 << 10
_LARGE = 1 << 15
"""Bytes of a message with full segments on any network. Longer streams wait for the listener's other streams."""
_MTUS = (8900, 4000, 1500, 1476, 1450, 1420, 1400, 1380, 1300, 1280, 1200, 1000, 576)
_HEADERS = {socket.AF_INET: 40, socket.AF_INET6: 60}
_ANSWER_TIME = 1.5
"""Seconds for an answer: a lost segment is sent again in 0.2 s, and again 0.4 s later."""
_IDLE = 20.0
_TURN = 15.0
"""Seconds for the streams of other hosts to the same one."""
_CHUNK = memoryview(bytes(1 << 18))
_SO_MAX_PACING_RATE = 47


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Serve and dial until the driver ends the input."""
    # A thread for each measure, and the usual 8 MB of stack count against the errand's memory.
    _thread.stack_size(1 << 18)
    low, high = _ephemeral_range()
    listener = _Listener(Prover(arguments["key"], arguments["name"]), arguments["address"])
    # As the agent chooses the job's ports, and then as kernels choose ports for connections.
    listener.listen(free_port())
    step = max(1, (high - low) // _SAMPLES)
    for port in arguments["ports"]:
        listener.listen_near(port, 16)
    # A busy host has hundreds of closed connections in a row, each of which keeps its port for a minute.
    for port in range(low + step // 2, high, step):
        listener.listen_near(port, step // 4)
    _thread.start_new_thread(listener.serve, ())
    write_line(stream, {"ports": listener.ports, "low": low, "high": high})
    answer_lines(stream, lambda dials: _dial_all(arguments["key"], dials))
    return {}


def _ephemeral_range() -> Tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return 32768, 60999
    return low, high


class _Listener:
    """Answers other hosts at several ports, in one thread, and in one more for each connection with measures."""

    def __init__(self, prover: Prover, known_as: Optional[str]) -> None:
        self.ports: List[int] = []
        self._prover = prover
        self._known_as = known_as
        self._selector = Selector()
        self._turn = _thread.allocate_lock()

    def listen_near(self, port: int, within: int) -> None:
        """Listen at the port, or at one of the next `within` if programs or closed connections of this host have it."""
        for candidate in range(port, min(port + within, 65535)):
            try:
                bound = free_port((candidate, candidate))
            except OSError:
                continue
            self.listen(bound)
            return

    def listen(self, bound: socket.socket) -> None:
        beacon = Beacon(bound, self._selector, self._prover, self._known_as, self._keep)
        self.ports.append(beacon.port)

    def serve(self) -> None:
        """Answer questions for ever."""
        while True:
            for call, _ in self._selector.select(None):
                call()

    def _keep(self, caller: socket.socket) -> None:
        """Wait for the measures of a host with the key."""
        self._selector.register(caller, READ, lambda: self._begin(caller))

    def _begin(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        try:
            # Most callers only look whether the port can be reached, and hang up: no thread for these.
            has_more = caller.recv(1, socket.MSG_PEEK)
        except OSError:
            has_more = b""
        if has_more:
            _thread.start_new_thread(self._serve, (caller,))
        else:
            caller.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The kernel keeps the time: with a timeout of its own, Python would call poll() before each read.
            caller.setblocking(True)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                caller.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(_IDLE), 0))
            buffer = bytearray(1 << 16)
            while True:
                size, milliseconds = _HEADER.unpack(_exactly(caller, _HEADER.size))
                if size <= _LARGE:
                    received = _receive(caller, buffer, size, milliseconds / 1000)
                else:
                    # Streams from two hosts would each get half of the link.
                    with self._turn:
                        caller.sendall(_GO)
                        received = _receive(caller, buffer, size, milliseconds / 1000)
                caller.sendall(_ANSWER.pack(*received))
        except (OSError, EOFError):
            return
        finally:
            caller.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Raises OSError, EOFError."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _receive(caller: socket.socket, buffer: bytearray, size: int, seconds: float) -> Tuple[int, float]:
    """Receive bytes, at most for so many seconds after the first; return their number and their time."""
    count, begin, now = 0, 0.0, 0.0
    while count < size and now <= begin + seconds:
        more = caller.recv_into(buffer, min(len(buffer), size - count))
        if not more:
            raise EOFError
        now = time.monotonic()
        begin = begin or now
        count += more
    return count, now - begin


def _dial_all(key: str, dials: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Dial the hosts at the same time; their streams take turns, or they would slow each other down."""
    measures: List[Dict[str, Any]] = [
        {"reached": [], "address": None, "rtt": None, "loss": None, "rate": None, "mtu": None} for _ in dials
    ]
    turn = _thread.allocate_lock()

    def dial(index: int) -> None:
        _dial(key, dials[index], measures[index], turn)

    _together(dial, len(dials))
    return measures


def _together(work: Callable[[int], None], count: int) -> None:
    """Run `work` with each of the numbers below `count`, each in a thread."""
    locks = [_thread.allocate_lock() for _ in range(count)]

    def run(index: int) -> None:
        try:
            work(index)
        finally:
            locks[index].release()

    for index, lock in enumerate(locks):
        lock.acquire()
        _thread.start_new_thread(run, (index,))
    for lock in locks:
        lock.acquire()


def _dial(key: str, dial: Dict[str, Any], measure: Dict[str, Any], turn: _thread.LockType) -> None:
    """Fill in the measure of a host. A failed part stays None."""
    try:
        # From an address of this host the way may be another one, so ports are not looked for.
        if "from" in dial:
            _measure(key, dial, (dial["addresses"][0], dial["ports"][0]), measure, turn)
            return
        address, reached = _reach_ports(key, dial)
        if address is not None:
            measure["address"], measure["reached"] = address, reached
            _measure(key, dial, (address, reached[0]), measure, turn)
    except (OSError, EOFError):
        return


def _reach_ports(key: str, dial: Dict[str, Any]) -> Tuple[Optional[str], List[int]]:
    """Return the first address with an answer, and the ports that answer there."""

    def proven(addresses: Sequence[str], ports: Sequence[int], settle: float) -> List[Tuple[str, int]]:
        targets = [(address, port) for address in addresses for port in ports]
        indexes: List[int] = []

        def on_proof(index: int) -> bool:
            indexes.append(index)
            return False

        reach(targets, key, dial["name"], dial["patience"], on_proof, settle=settle)
        return [targets[index] for index in sorted(indexes)]

    addresses, (first, *others) = dial["addresses"], dial["ports"]
    # Few connections for a good network: on busy hosts each costs time.
    answers = proven(addresses, [first], 0.1) or proven(addresses, others, dial["settle"])
    if not answers:
        return None, []
    address = answers[0][0]
    reached = {port for other, port in answers if other == address}
    left = [port for port in dial["ports"] if port not in reached]
    reached.update(port for _, port in proven([address], left, dial["settle"]))
    return address, sorted(reached)


def _measure(
    key: str, dial: Dict[str, Any], target: Tuple[str, int], measure: Dict[str, Any], turn: _thread.LockType
) -> None:
    """Raises OSError, EOFError."""
    connection = _connect(key, dial, target)
    try:
        measure["rtt"] = _round_trip(connection)
        try:
            _send(connection, _LARGE, 0.5)
        except socket.timeout:
            mtu = _passing_mtu(key, dial, target)
            # Every size passes now: size was not the matter.
            measure["mtu"] = None if mtu == _MTUS[0] else mtu
            return
        with turn:
            rates = []
            for _ in range(dial["tries"]):
                count, seconds = _send(connection, dial["size"], dial["seconds"])
                # A stream that ends while the kernel still raises its speed says nothing.
                if seconds > 4 * measure["rtt"]:
                    rates.append(count / seconds)
                if count < dial["size"]:
                    # The listener reads no more.
                    connection.close()
                    connection = _connect(key, dial, target)
                    break
            measure["rate"] = max(rates, default=None)
            measure["loss"] = _loss(connection, dial, measure["rate"])
    finally:
        connection.close()


def _round_trip(connection: socket.socket) -> float:
    """Return the seconds of the fastest of some messages. Raises OSError, EOFError."""
    best = float("inf")
    for count in range(1, _PINGS + 1):
        begin = time.monotonic()
        _send(connection, 1, 1.0)
        best = min(best, time.monotonic() - begin)
        if count >= _FEW_PINGS and best < _NEAR:
            break
    return best


def _loss(connection: socket.socket, dial: Dict[str, Any], rate: Optional[float]) -> Optional[float]:
    """Return the part of segments that a slow stream has lost; None if the kernel does not say. Raises OSError, EOFError."""
    # Too slow for an overflow of queues: the link itself has lost the segments.
    pace = max(20000, int(min(dial["pace"], (rate or dial["pace"] * 4) / 4)))
    before = _segments(connection)
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
    _send(connection, min(dial["paced"], int(pace * dial["seconds"])), 3 * dial["seconds"])
    after = _segments(connection)
    if before is None or after is None:
        return None
    return min(1.0, max(0.0, (after[0] - before[0]) / max(1, after[1] - before[1])))


def _connect(
    key: str, dial: Dict[str, Any], target: Tuple[str, int], most_segment: Optional[int] = None
) -> socket.socket:
    """Return a proven connection. Raises OSError, EOFError."""
    # As bytes: text would pass the codec for international names, whose import takes 2 ms.
    family, kind, protocol, _, endpoint = socket.getaddrinfo(
        target[0].encode("ascii"), target[1], type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    connection = socket.socket(family, kind, protocol)
    try:
        if most_segment is not None:
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_MAXSEG, max(88, most_segment - _HEADERS[family])
            )
        connection.settimeout(_ANSWER_TIME)
        if "from" in dial:
            connection.bind((dial["from"], 0))
        connection.connect(endpoint)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Unsent bytes at the end are of no use.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        question = Question(key, dial["name"], *target)
        connection.sendall(question.data)
        if question.is_answer(_exactly(connection, ANSWER_SIZE)):
            return connection
    except BaseException:
        connection.close()
        raise
    connection.close()
    raise EOFError


def _send(connection: socket.socket, size: int, seconds: float) -> Tuple[int, float]:
    """Send bytes until the listener answers; return its count and seconds. Raises OSError, EOFError.

    Raises socket.timeout if there is no answer in time.
    """
    header = _HEADER.pack(size, int(seconds * 1000))
    if size > _LARGE:
        connection.settimeout(_TURN)
        connection.sendall(header)
        _exactly(connection, len(_GO))
        header = b""
    # A small message goes out in one segment.
    first = header + bytes(min(size, _SMALL))
    left = size - min(size, _SMALL)
    if not left:
        connection.settimeout(seconds + _ANSWER_TIME)
        connection.sendall(first)
        return _answer(connection, size)
    unsent = memoryview(first)
    deadline = time.monotonic() + seconds + _ANSWER_TIME
    connection.setblocking(False)
    try:
        while True:
            wait = max(0.0, deadline - time.monotonic())
            readable, writable, _ = select.select([connection], [connection] if unsent else [], [], wait)
            if readable:
                break
            if not writable:
                raise socket.timeout
            try:
                unsent = unsent[connection.send(unsent) :]
            except BlockingIOError:
                continue
            if not unsent and left:
                unsent = _CHUNK[:left]
                left -= len(unsent)
    finally:
        connection.settimeout(_ANSWER_TIME)
    return _answer(connection, size)


def _answer(connection: socket.socket, size: int) -> Tuple[int, float]:
    count, taken = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
    return min(count, size), taken if 0 <= taken < _IDLE else 0.0


def _segments(connection: socket.socket) -> Optional[Tuple[int, int]]:
    """Return the number of retransmitted and of sent segments, from TCP_INFO of tcp(7); None from an old kernel."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    if len(info) < _SENT_AT + 4:
        return None  # a kernel before 4.2
    (again,) = struct.unpack_from("=I", info, _AGAIN_AT)
    (sent,) = struct.unpack_from("=I", info, _SENT_AT)
    if len(info) >= _UNNEEDED_AT + 4:
        # A busy host answers late: segments were sent again after their arrival.
        again -= min(again, *struct.unpack_from("=I", info, _UNNEEDED_AT))
    return again, sent


def _passing_mtu(key: str, dial: Dict[str, Any], target: Tuple[str, int]) -> int:
    """Return the largest usual MTU for a passing stream; 0 if every size vanishes."""
    passing: List[int] = []

    def attempt(index: int) -> None:
        try:
            connection = _connect(key, dial, target, _MTUS[index])
            try:
                _send(connection, _LARGE, 0.5)
            finally:
                connection.close()
        except (OSError, EOFError):
            return
        passing.append(_MTUS[index])

    _together(attempt, len(_MTUS))
    return max(passing, default=0)
